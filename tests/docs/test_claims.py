"""Numbers that README and the pages state are those of the tables that they were measured in."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pandas
import pytest

from tests.support.doc_blocks import ROOT

Frame = Any


class Claim(NamedTuple):
    """A sentence of a page, and where its numbers come from.

    Attributes:
        page: the page.
        sentence: a pattern that the page has once, with line ends as blanks; its groups are what is claimed.
        table: the table, in ``benchmarks/``.
        read: what the table says in the place of each group, as the page writes it.
    """

    page: str
    sentence: str
    table: str
    read: Callable[[Frame], Sequence[object]]


def none_or(number: int) -> str:
    return str(number or "none")


def above(table: Frame) -> Frame:
    """By how many percent each plan that is above its budget is so."""
    measured = table.measured_peak_bytes if "measured_peak_bytes" in table else table.measured_bytes
    return (100 * (measured / table.budget_bytes - 1))[measured > table.budget_bytes]


def above_unannounced(table: Frame) -> Frame:
    return above(table)[table.said.isna()]


def most_bytes_above(table: Frame) -> int:
    return round((above_unannounced(table) / 100 * table.budget_bytes).max())


def to_the_byte(table: Frame) -> int:
    return int((table.error_percent == 0).sum())


def off(table: Frame) -> Frame:
    return (table.predicted_over_measured - 1).abs()


def row(table: Frame, **wanted: object) -> Any:
    return table[(table[list(wanted)] == list(wanted.values())).all(axis=1)].iloc[0]


def whole_and_in_pieces(table: Frame, way: str) -> tuple[str, ...]:
    """Peak in GiB and time of the first model, with its head whole and in pieces."""
    rows = [row(table, model=table.model[0], head=head, way=way) for head in ("whole", "in pieces")]
    return tuple(text for each in rows for text in (f"{each.peak_MiB / 1024:.1f}", f"{each.over_plain:.2f}"))


def in_pieces(way: Any) -> tuple[str, ...]:
    return f"{way.peak_mib:,.0f}", f"{way.beyond_states_mib:.0f}", f"{way.over_recomputing:.2f}"


def span(steps: Frame) -> tuple[str, str]:
    return f"{steps.min():.0f}", f"{steps.max():.0f}"


def exact_plans(models: Frame) -> tuple[object, ...]:
    plans = models[models.measured_bytes.notna()]
    return models.model.nunique(), int(plans.differs.isna().sum()), len(plans), none_or(len(above_unannounced(plans)))


# fmt: off
CLAIMS = [
    Claim("README.md", r"(\d+) of (\d+) equal to the byte, (\w+) above\]\(\S+/fidelity.md", "results/fidelity",
          lambda t: (to_the_byte(t), len(t), none_or(len(above(t))))),
    Claim("README.md", r"(\d+) of (\d+) equal, (\d+) above\]\(\S+/graph-fidelity.md", "results/graph-fidelity",
          lambda t: (to_the_byte(t), len(t), len(above(t)))),
    Claim("README.md", r"(\d+) models of .*? \[(\d+) of (\d+) plans exact, (\w+) above (?:its|their) budgets?\]",
          "results/packages", exact_plans),
    Claim("README.md", r"\[(\d+) to (\d+) plain steps, and ([\d.]+) % faster to ([\d.]+) % slower\]",
          "results/overhead",
          lambda t: (span(t.profile_in_plain_steps)[0], span(t.with_menus_in_plain_steps)[1],
                     *(f"{abs(100 * each):.1f}" for each in (t.planned_over_plain - 1).agg(["min", "max"])))),
    Claim("README.md", r"off by (\d+) % \(median\), ([\d.]+) of a step\]", "results/extra-seconds",
          lambda t: (f"{100 * off(t).median():.0f}", f"{(t.predicted_extra - t.measured_extra).abs().median():.3f}")),
    Claim("README.md", r"DDP \[(\d+) of (\d+) equal to the byte, (\w+) above\]", "results/distributed-ddp",
          lambda t: (to_the_byte(t), len(t), none_or(len(above(t))))),
    Claim("README.md", r"at most ([\d.]+) % off, (\w+) of (\d+) above\]", "results/distributed-fsdp2",
          lambda t: (f"{t.error_percent.abs().max():.1f}", none_or(len(above(t))), len(t))),
    Claim("README.md", r"(\d+) runs \| \[losses equal bit for bit, (\w+) above its budget\]", "results/trainers",
          lambda t: (int(t.losses_equal.sum()), none_or(len(above(t))))),
    Claim("README.md", r"\[([\d.]+) of the plain speed\]", "results/headline",
          lambda t: (f"{float(row(t, way='recompute', times_unplanned=10).relative_speed):.2f}",)),
    Claim("README.md", r"as fast or faster in (\d+) of (\d+), median ([\d.]+) of their time\]", "results/peers",
          lambda t: (int((t.plan_over_peer <= 1).sum()), len(t), f"{t.plan_over_peer.median():.2f}")),
    Claim("README.md", r"within ([\d.]+) % of the lower bound in (\d+) to (\d+) s\]", "results/chain-solvers-long",
          lambda t: (f"{100 * t.gap[t.depth > 0].max():.1f}", *span(t.seconds[t.depth > 0]))),
    Claim("README.md", r"(\d+) of (\d+) plans were above their budgets unannounced", "results-gpu/catalogue-cuda",
          lambda t: (len(above_unannounced(t)), len(t))),
    Claim("docs/limitations.md", r"(\w+) of (\d+) of \[transformers' models\]", "results/catalogue",
          lambda t: (none_or(len(above_unannounced(t))), len(t))),
    Claim("docs/limitations.md", r"(\d+) of (\d+) of \[other packages\]\(\S+ \(by ([\d,]+) bytes\)", "results/packages",
          lambda t: (len(above_unannounced(t)), int(t.measured_bytes.notna().sum()), f"{most_bytes_above(t):,}")),
    Claim("docs/limitations.md", r"(\w+) of (\d+) under \[`fully_shard`\]", "results/distributed-fsdp2",
          lambda t: (none_or(len(above_unannounced(t))), len(t))),
    Claim("docs/limitations.md", r"(\w+) of (\d+) under \[DDP\]\(\S+ with gloo \(by (\d+) bytes",
          "results/distributed-ddp",
          lambda t: (none_or(len(above_unannounced(t))), len(t), most_bytes_above(t))),
    Claim("docs/limitations.md", r"on a GPU (\d+) of (\d+) \(by (\d) MiB\)", "results-gpu/catalogue-cuda",
          lambda t: (len(above_unannounced(t)), len(t), most_bytes_above(t) // 2**20)),
    Claim("docs/distributed.md", r"\[(\w+) of (\d+) plans\]\(\S+ on two ranks", "results/distributed-fsdp2",
          lambda t: (none_or(len(above(t))), len(t))),
    Claim("docs/distributed.md", r"\[(\d+) of (\d+)\]\(\S+ on four, by ([\d.]+) %", "results/distributed-fsdp2-4",
          lambda t: (len(above(t)), len(t), *(f"{each:.2f}" for each in above(t)))),
    Claim("docs/estimate.md", r"(\d+) of (\d+) steps of (\d+) models, .* were within 0.1 %", "results/estimates-peaks",
          lambda t: (int((t.percent.abs() <= 0.1).sum()), t.percent.count(), t.model[t.failed.isna()].nunique())),
    Claim("docs/estimate.md", r"of the (\d+) that were more than 3 % off", "results/estimates-peaks",
          lambda t: (int((t.percent.abs() > 3).sum()),)),
    Claim("docs/estimate.md", r"took ([\d.]+) to ([\d.]+) times the estimate", "results/estimates-seconds",
          lambda t: [f"{each:.2f}" for each in (1 / (1 + t.off_percent / 100)).agg(["min", "max"])]),
    Claim("docs/estimate.md", r"A GPT-2 of .*? was estimated at ([\d,]+) bytes", "results-gpu/fidelity-gpt2-cuda",
          lambda t: (f"{t.measured_peak_bytes.max():,}",)),
    Claim("docs/estimate.md", r"A U-Net .*; ([\d,]+) were measured", "results-gpu/fidelity-unet-cuda",
          lambda t: (f"{t.measured_peak_bytes.max():,}",)),
    Claim("docs/pieces.md", r"takes ([\d,]+) MiB at the .* without pieces", "results/large-head",
          lambda t: (f"{row(t, way='recomputing, smallest budget').peak_mib:,.0f}",)),
    Claim("docs/pieces.md", r"and ([\d,]+) MiB with them \((\d+) MiB .* states, .*, in ([\d.]+) times",
          "results/large-head", lambda t: in_pieces(row(t, way="in pieces, smallest budget"))),
    Claim("docs/pieces.md", r"takes ([\d.]+) times as long at the same peak", "results/large-head",
          lambda t: (f"{1 / t.over_by_hand.mean():.1f}",)),
    *(Claim("docs/why-the-peak.md", rf"\| {line} \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|",
            "results/true-peak-boundaries", partial(whole_and_in_pieces, way=way))
      for line, way in (("everything kept", "everything kept"), ("every block recomputed", "every block recomputed"),
                        (r"and its input in host memory .*?", "and its input in host memory"),
                        ("a plan with the peak of recomputing every block", "ours, at the peak of every block"),
                        ("a plan with the peak of the line before that",
                         "ours, at the peak with inputs in host memory"))),
    Claim("docs/workload.md", r"as long as (\d+) to (\d+) plain steps", "results/overhead",
          lambda t: (span(t.profile_in_plain_steps)[0], span(t.with_menus_in_plain_steps)[1])),
    Claim("docs/workload.md", r"and (\d+) to (\d+) for \[ten\]", "results/extra-seconds",
          lambda t: span(t.profile_in_plain_steps)),
    Claim("docs/plans.md", r"as long as (\d+) to (\d+) plain steps", "results/overhead",
          lambda t: (span((t.with_menus_in_plain_steps - t.profile_in_plain_steps).round()))),
]
# fmt: on


def disagreement(claim: Claim, text: str) -> str:
    """What a page's text claims other than its table says; empty where they agree."""
    found = re.findall(claim.sentence, " ".join(text.split()))
    if len(found) != 1:
        return f"{claim.page} has {len(found)} sentences like {claim.sentence!r}"
    claimed = [found[0]] if isinstance(found[0], str) else list(found[0])
    said = [str(each) for each in claim.read(pandas.read_csv(ROOT / "benchmarks" / f"{claim.table}.csv"))]
    return "" if claimed == said else f"{claim.page} claims {claimed}, {claim.table} says {said}"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.page}-{claim.table}")
def test_a_page_claims_what_its_table_says(claim: Claim) -> None:
    assert disagreement(claim, (ROOT / claim.page).read_text(encoding="utf-8")) == ""


@pytest.mark.parametrize("changed", ["[41 of 42 equal", "[4 of 42 equal", "[most are equal"])
def test_a_sentence_that_claims_something_else_is_found(changed: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert disagreement(CLAIMS[0], re.sub(r"\[\d+ of \d+ equal", changed, text, count=1))
