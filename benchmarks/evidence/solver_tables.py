"""What the tables say of solvers, of plans of single ops, and of torch's own ways."""

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


def graph_peaks(frame: Frame) -> str:
    """Predicted against measured peaks of plans of single ops."""
    known = frame[frame.measured_peak_bytes.notna()]
    equal = int((known.error_percent == 0).sum())
    over = int(known.over_budget.astype(str).eq("True").sum())
    rest = "" if equal == len(known) else f", the others within {known.error_percent.abs().max():.2g} %"
    refused = len(frame) - len(known)
    more = f"; {refused} of {len(frame)} budgets refused, in words" if refused else ""
    return f"{of(equal, len(known))} plans equal to the byte{rest}; {over or 'none'} above the budget{more}"


def graph_stages(frame: Frame) -> str:
    """Plans of single ops against plans of stages."""
    smallest = frame.groupby("model").first()
    lower = 100 * (1 - smallest.graph_smallest_bytes / smallest.stages_smallest_bytes)
    dear = frame[frame.stages_slowdown > 1.1]
    half = int(((dear.graph_slowdown - 1) <= (dear.stages_slowdown - 1) / 2).sum())
    return (
        f"smallest budgets {span(lower, '.0f')} % lower; at most half of the extra time at {of(half, len(dear))} "
        f"budgets "
        f"where stages take above 10 %; slower in {of(int((frame.graph_over_stages > 1).sum()), len(frame))}"
    )


def graph_planning(frame: Frame) -> str:
    """Gaps to the bound after a limited search."""
    roomy, smallest = frame[frame.share_of_range > 0], frame[frame.share_of_range == 0]
    worst = roomy.groupby("model").gap_percent.max().sort_values()
    return (
        f"gaps to the bound at 20 to 80 % of the range at most {worst.iloc[-1]:.2g} % ({worst.index[-1]}), "
        f"{worst.iloc[-2]:.2g} % for all others; at the smallest budget {span(smallest.gap_percent)} %; the largest, "
        f"of "
        f"{frame.ops.max():,} ops, is profiled in {frame.profile_seconds[frame.ops.idxmax()]:.0f} s"
    )


def partitions(frame: Frame) -> str:
    """Plans of single ops against torch's own partitions."""
    same = frame[frame.ours == "same peak"]
    known = same[same.ours_over_theirs.notna()]
    below = 100 * (1 - known.smallest_bytes / known.groupby("model").peak_bytes.transform("min"))
    return (
        f"as fast or faster in {of(int((known.ours_over_theirs <= 1).sum()), len(same))} rows, "
        f"{span(known.ours_over_theirs, '.2f')} of their time; the smallest peak that they reach is undercut by "
        f"{span(below, '.0f')} %"
    )


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
