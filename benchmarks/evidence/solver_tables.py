"""What the tables say of solvers, and of torch's own ways."""

from __future__ import annotations

import pandas as pd

from benchmarks.evidence.wording import Frame, of, percent, span


def rotor_frontier(frame: Frame) -> str:
    """Seconds of whole frontiers."""
    slowest = frame.groupby("stages").seconds.max()
    return "; ".join(f"{seconds:.1f} s for {stages} stages" for stages, seconds in slowest.items())


def certificate(frame: Frame) -> str:
    """Proven distances from the persistent optimum."""
    return f"at most {percent(frame.largest.max())}, {percent(frame['mean'].mean())} on average"


def uniform(frame: Frame) -> str:
    """Forward runs against the closed form."""
    more = (frame.rotor - frame.closed_form).max()
    equal = bool((frame.revolve == frame.closed_form).all())
    return (
        f"`revolve` {'equal' if equal else 'not equal'}, `rotor` at most {more} run more, of {frame.closed_form.max()}"
    )


def long_chains(frame: Frame) -> str:
    """Chains of a thousand stages."""
    roomy = frame[frame.depth > 0]
    return (
        f"within {percent(roomy.gap.max())} of the bound from a tenth of the range of budgets up, in "
        f"{span(roomy.seconds, '.1f')} s; at the smallest budget {percent(frame.gap.max())}"
    )


def chain_proofs(frame: Frame) -> str:
    """Proofs of the optimum."""
    return f"{of(frame.proven.sum(), frame.problems.sum())} proven, the slowest in {frame.slowest_seconds.max():.1f} s"


def graph_solvers(frame: Frame) -> str:
    """`auto` on training graphs."""
    rows = frame[frame.status != "infeasible"]
    gaps: Frame = pd.to_numeric(rows["gap_%"], errors="coerce")
    small, large = rows.nodes <= 234, rows.nodes > 234
    return (
        f"up to 234 ops within {gaps[small].max():.2g} % of the bound in at most {rows.seconds[small].max():.0f} s; "
        f"up to "
        f"{rows.nodes.max():,} ops within {gaps[large].max():.2g} % in at most {rows.seconds[large].max():.0f} s"
    )


def verdicts(frame: Frame) -> str:
    """Numbers that were to be reached."""
    return f"{of(int((frame.verdict == 'reached').sum()), len(frame))} reached"


def oracle(frame: Frame) -> str:
    """Graph methods against the exhaustive search."""
    right = int((frame.verdict == "never wrong").sum())
    return f"{of(right, len(frame))} methods never wrong, on {frame.instances.max():,} problems"


def torch_ways(frame: Frame) -> str:
    """Eager plans against torch's own ways, at their peak."""
    known = frame[frame.plan_over_peer.notna()]
    return (
        f"as fast or faster in {of(int((known.plan_over_peer <= 1).sum()), len(frame))} rows, median "
        f"{known.plan_over_peer.median():.2f} of their time, at most {known.plan_over_peer.max():.2f}; "
        f"{int((known.plan_peak_MiB > known.peer_peak_MiB).sum()) or 'no'} plan above its peer's peak"
    )


def methods(frame: Frame) -> str:
    """The best methods of each of some small graphs."""
    gaps = frame.assign(gap=pd.to_numeric(frame["gap_%"], errors="coerce")).dropna(subset=["gap"])
    worst = gaps.groupby("solver").gap.agg(["count", "max"])
    worst = worst[worst["count"] == frame.problem.nunique()]["max"].sort_values()
    return "largest gap to the bound: " + ", ".join(f"`{name}` {gap:.2g} %" for name, gap in worst.head(4).items())
