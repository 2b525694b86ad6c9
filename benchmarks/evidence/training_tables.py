"""What the tables say that were measured on training steps: peaks, seconds, states, loops."""

from __future__ import annotations

from benchmarks.evidence.wording import Frame, against_plain, of, percent, predicted_peaks, span


def peaks_and_values(frame: Frame) -> str:
    """Predicted against measured peaks, and whether loss and gradients are those of the unplanned step."""
    same = int(frame.as_unplanned.astype(bool).sum())
    return f"{predicted_peaks(frame)}; loss and gradients of {of(same, len(frame))} bit for bit the unplanned ones"


def model_states(frame: Frame) -> str:
    """Formulas against measured states."""
    worst = frame.largest_difference_percent.max()
    equal = int((frame.largest_difference_percent == 0).sum())
    return f"{of(equal, len(frame))} rows equal to the byte in all parts; every part within {worst:.2g} %"


def overhead(frame: Frame) -> str:
    """A plan that keeps everything; profiling in plain steps."""
    return (
        f"{against_plain(frame.planned_over_plain)}; profiling takes {span(frame.profile_in_plain_steps, '.0f')} plain "
        f"steps, with menus {span(frame.with_menus_in_plain_steps, '.0f')}"
    )


def host_cost(frame: Frame) -> str:
    """Times the plain step, by way of recomputing."""
    over = frame.set_index("way").over_plain
    others = "; ".join(f"{way} {ratio:.2f}" for way, ratio in over.items() if way != "plain")
    return f"times the plain step: {others}"


def pieces(frame: Frame) -> str:
    """Peaks, smallest budgets and gradients of steps in pieces."""
    exact = int((frame.measured_minus_predicted_bytes == 0).sum())
    above = int((frame.above_budget_bytes > 0).sum())
    smaller = (frame.smallest_mib - frame.states_mib) / (frame.smallest_in_pieces_mib - frame.states_mib)
    worst = (frame.gradient_error / frame.plain_gradient_error).max()
    of_any = (frame.worst_gradient_error / frame.plain_worst_gradient_error).max()
    return (
        f"{of(exact, len(frame))} peaks to the byte, {above} above the budget; smallest budgets beyond the states are "
        f"{span(smaller)} times smaller; gradients are at most {worst:.2f} times as far from double precision as the "
        f"plain step's, the worst of one parameter {of_any:.2f} times"
    )


def large_head(frame: Frame) -> str:
    """Bytes and seconds of ways to take a step with a large head."""
    ways = frame.set_index("way")
    smallest, recomputing = ways.loc["in pieces, smallest budget"], ways.loc["recomputing, smallest budget"]
    at_its = ways.loc["in pieces, smallest budget of recomputing"]
    by_hand = frame.over_by_hand.dropna()
    return (
        f"beyond parameters, gradients and optimizer {smallest.beyond_states_mib:.0f} MiB in place of "
        f"{recomputing.beyond_states_mib:.0f}, in {smallest.over_recomputing:.2f} times the step; at the same budget "
        f"{at_its.over_recomputing:.2f} times; at the peaks of two steps by hand {span(by_hand)} times theirs; "
        f"{int((frame.above_budget_bytes > 0).sum())} above the budget"
    )


def head_rows(frame: Frame) -> str:
    """Times the step with all rows at once."""
    parts = [f"{rows} rows {span(group.over_all_at_once)}" for rows, group in frame.groupby("rows_at_once")]
    return f"times all rows at once: {'; '.join(parts[:-1])}"


def true_peak_shares(frame: Frame) -> str:
    """How often a smaller share has a higher peak, and whether our plans are within their budgets."""
    parts = []
    for model, rows in frame.groupby("model", sort=False):
        rises = int((rows.peak_bytes.diff() > 0).sum())
        parts.append(f"{model} {rises} of {len(rows) - 1}")
    above = int((frame.our_peak_bytes > frame.peak_bytes).sum())
    exact = int((frame.our_peak_bytes == frame.our_predicted_bytes).sum())
    return (
        f"a smaller share has a higher peak in {', '.join(parts)}; our plans: {exact} of {len(frame)} as predicted to "
        f"the byte, {above} above their budget"
    )


def true_peak_boundaries(frame: Frame) -> str:
    """By how much inputs in host memory lower the peak."""
    parts = []
    for (model, head), rows in frame.groupby(["model", "head"], sort=False):
        peaks = rows.set_index("way").peak_MiB
        recomputed, sent = peaks["every block recomputed"], peaks["and its input in host memory"]
        parts.append(f"{model}, head {head}: {1 - sent / recomputed:.1%} lower")
    return "; ".join(parts)


def pieces_fuzz(frame: Frame) -> str:
    """Generated steps in pieces."""
    plans, apart = int(frame.plans.sum()), frame[frame.parts != "none"]
    return (
        f"{int(frame.wrong.sum())} wrong, {int(frame.above.sum())} above the budget, {int(frame.crashed.sum())} "
        f"crashed, of {plans:,}; {int(apart.plans.sum())} ran in pieces, {int(apart.to_the_byte.sum())} of them to the "
        f"byte, {int(apart.as_near_as_plain.sum())} with gradients as near to double precision as the plain step's, "
        "or within 32 roundings"
    )


def planning(frame: Frame) -> str:
    """How long profiling and solving take."""
    return "; ".join(
        f"{row.layers} blocks: a profile takes {row.profile_steps:.0f} plain steps, "
        f"{row.seconds_beside_15_steps:.1f} s beyond 15 of them, a plan {row.solve_seconds:.1f} s"
        for row in frame.itertuples()
    )


def rank_overhead(frame: Frame) -> str:
    """The same on two ranks, by engine."""
    parts = [f"{engine}: {against_plain(rows.planned_over_plain)}" for engine, rows in frame.groupby("engine")]
    return "; ".join(parts)


def extra_seconds(frame: Frame) -> str:
    """Predicted against measured extra seconds."""
    off = (frame.predicted_over_measured - 1).abs()
    verified = (frame.verified_predicted_over_measured - 1).abs()
    missed = (frame.predicted_extra - frame.measured_extra).abs().median()
    return (
        f"predicted extra seconds differ from measured ones by {percent(off.median())} (median), {percent(off.max())} "
        f"at most; the median error is {missed:.2g} of a step, and two sets of plain steps differ by "
        f"{frame.noise.median():.2g} of one; once the plan is corrected by its own run the median is "
        f"{percent(verified.median())}; profiling takes {span(frame.profile_in_plain_steps, '.0f')} plain steps"
    )


def equal_budget(frame: Frame) -> str:
    """Plans against earlier ones at the same budgets."""
    dear = frame[frame.stages_slowdown > 1.1]
    halved = dear.now_slowdown - 1 <= (dear.stages_slowdown - 1) / 2
    return (
        f"{frame.now_over_best.median():.3f} of the time of the faster of the two earlier plans (median), "
        f"{frame.now_over_best.max():.3f} (most); at most half the extra time of the earlier plans of stages in "
        f"{of(int(halved.sum()), len(dear))} budgets where that is above 10 %"
    )


def recording(frame: Frame) -> str:
    """Remembering what a second run sees."""
    return (
        f"{span(100 * frame.recording_share)} % of the step; putting it in place and back "
        f"{span(100 * frame.reinstating_share)} %"
    )


def fuzz(frame: Frame) -> str:
    """Generated models."""
    row = frame.iloc[0]
    ran = row.exact + row.said + row.refused
    return (
        f"{row.wrong} silently wrong, {row.crash} crashed, {row.over} above the budget without having said so, of "
        f"{row.cases:,}; {row.refused} refused, in words ({percent(row.refused / ran)} of those that ran with a plan)"
    )


def trainers(frame: Frame) -> str:
    """Loops of frameworks."""
    return (
        f"{of(int(frame.losses_equal.sum()), len(frame))} runs: losses equal bit for bit to those without a plan; "
        f"{int((frame.above_budget > 0).sum()) or 'none'} above the budget; {int((frame.off == 0).sum())} peaks equal "
        f"to "
        f"the predicted byte, none more than {percent(frame.off.abs().max())} off"
    )


def loops(frame: Frame) -> str:
    """Loops as people write them."""
    above = frame[frame.above_budget > 0]
    silent, most = int(above.said.isna().sum()), above.above_budget.max() if len(above) else 0
    equal = int((frame.off == 0).sum())
    return (
        f"{of(len(frame) - len(above), len(frame))} loops within their budget; {equal} equal to the "
        f"predicted byte; the others at most {most} bytes above the budget, {silent or 'none'} without having said so"
    )


def packages(frame: Frame) -> str:
    """Models of other packages."""
    planned = frame[frame.measured_bytes.notna()]
    silent = planned[(planned.above_bytes > 0) & planned.said.isna()]
    own = frame[frame.own_bytes.notna()].groupby("model").first()
    return (
        f"{of(int(planned.differs.isna().sum()), len(planned))} plans of {frame.model.nunique()} models exact; "
        f"{len(silent) or 'none'} above the budget without having said so; "
        f"{of(int((planned.measured_bytes == planned.predicted_bytes).sum()), len(planned))} peaks equal to the "
        f"predicted byte; smallest budget at most the peak of the package's own checkpointing in "
        f"{of(int((own.smallest_bytes <= own.own_bytes).sum()), len(own))}"
    )


def catalogue(frame: Frame) -> str:
    """Families of transformers."""
    silent = frame[(frame.measured_peak_bytes > frame.budget_bytes) & frame.said.isna()]
    equal = int((frame.predicted_peak_bytes == frame.measured_peak_bytes).sum())
    return (
        f"{of(int(frame.differs.isna().sum()), len(frame))} plans of {frame.model.nunique()} classes exact; "
        f"{len(silent) or 'none'} above the budget without having said so; {equal} measured as predicted to the byte"
    )


def headline(frame: Frame) -> str:
    """Ten times the batch."""
    ours = frame[~frame.form.str.startswith("reference") & (frame.way == "recompute")]
    ten = ours[ours.times_unplanned == 10].iloc[0]
    largest = ours[ours.relative_speed != "-"].iloc[-1]
    return (
        f"at {ten.times_unplanned:g} times the batch {ten.relative_speed} of the speed ({ten.predicted_relative_speed} "
        f"predicted), where a V100 is documented at 0.744; the largest batch is {largest.times_unplanned:g} times, at "
        f"{largest.relative_speed}"
    )


def headline_resnet(frame: Frame) -> str:
    """Checkpoints by hand against solved ones."""
    rows = frame.set_index("way")
    plain = rows.measured_peak_MiB["no plan"]

    def of_way(way: str) -> str:
        less = 1 - rows.measured_peak_MiB[way] / plain
        return f"{percent(rows.measured_slowdown[way] - 1)} extra time for {percent(less)} less memory"

    return (
        f"by hand {of_way('by hand')}; solved for the same memory {of_way('solver, same budget')}; solved for the same "
        f"predicted time {of_way('solver, same seconds')}"
    )


def nested(frame: Frame) -> str:
    """Nested segments of a GPT."""
    peaks = frame.set_index("plan").peak_beyond_resident_MiB
    return (
        f"{peaks['keep_all']:.1f} MiB unplanned, {peaks['recompute_all']:.1f} MiB with every block checkpointed, "
        f"{peaks['rotor at its smallest budget']:.1f} MiB with nested segments"
    )


def offload(frame: Frame) -> str:
    """Offload over artificial links."""
    equal = int((frame.error_percent == 0).sum())
    over = int(frame.over_budget.sum())
    return f"{of(equal, len(frame))} peaks equal to the byte; {over or 'none'} above the budget"


def offload_simulated(frame: Frame) -> str:
    """BERT-Large on a simulated V100: what copies remove of recomputation's extra time."""
    fast = frame[(frame.budget_percent == 50) & (frame.link_GBps == 25)].set_index("level")
    removed = fast["removed_percent_of_recompute_s_extra"]
    return "; ".join(f"{level}: {removed[level]:.0f} % of its extra time removed" for level in removed.index)


def max_batch(frame: Frame) -> str:
    """Predicted limits against those found by trying."""
    return (
        f"{of(int((frame.steps_off.abs() <= 1).sum()), len(frame))} within one sample, "
        f"{int((frame.steps_off == 0).sum())} equal"
    )


def advice(frame: Frame) -> str:
    """What advise predicts, built for real."""
    equal = int((frame.predicted_peak_bytes == frame.measured_peak_bytes).sum())
    return f"{of(equal, len(frame))} peaks equal to the byte; {int(frame.over_budget.sum()) or 'none'} above the budget"


def dynamic(frame: Frame) -> str:
    """Batches of changing lengths."""
    within = int((frame[["first_peak_MiB", "peak_MiB"]].max(axis=1) <= frame.budget_MiB).sum())
    plain = frame.plain_ms.sum()
    own, single = ((frame.plain_ms * frame[name]).sum() / plain for name in ("slowdown", "slowdown_single"))
    return (
        f"within the budget at {of(within, len(frame))} lengths; {own:.2f} times the unplanned seconds (medians), "
        f"against {single:.2f} with every batch under the longest one's plan"
    )


def ranks(frame: Frame) -> str:
    """Plans on several ranks."""
    equal = int((frame.error_percent == 0).sum())
    above = int((~frame.within.astype(bool)).sum())
    exact = int(frame.equal.astype(bool).sum())
    rest = "" if equal == len(frame) else f", none more than {frame.error_percent.abs().max():.2g} % off"
    return (
        f"{of(equal, len(frame))} plans equal to the byte on the worst rank{rest}; {above or 'none'} above the "
        f"budget; losses and gradients of {exact} bit for bit those of the unplanned run"
    )


def simulated_ranks(frame: Frame) -> str:
    """One simulated rank against the worst of real ones."""
    parts = []
    for engine, rows in frame.groupby("engine"):
        equal, over = (rows.difference_percent == 0).sum(), (rows.planned_measured_bytes > rows.budget_bytes).sum()
        parts.append(
            f"{engine}: {of(int(equal), len(rows))} unplanned peaks equal to the byte, the others within "
            f"{rows.difference_percent.abs().max():.2g} %, {over or 'no'} plan above its budget"
        )
    return "; ".join(parts)


def estimates(frame: Frame) -> str:
    """Estimated against measured peaks."""
    rows = frame[frame.failed.isna() | (frame.failed == "")]
    off, equal = rows.percent.abs(), int((rows.difference_bytes == 0).sum())
    low = int(((rows.percent < -0.5) & (rows.difference_bytes < -rows.margin_bytes)).sum())
    refused = len(frame) - len(rows)
    said = f"{of(equal, len(rows))} equal to the byte, {int((off <= 0.1).sum())} within 0.1 %, "
    said += f"{int((off <= 2).sum())} within 2 %; {low or 'none'} more than 0.5 % and the stated margin too low"
    return f"{said}; {refused} refused" if refused else said


def estimated_seconds(frame: Frame) -> str:
    """Estimated against measured seconds."""
    off, against = frame.off_percent.abs(), frame.against_measured_plan.dropna()
    close = of(int((against <= 1.03).sum()), len(against))
    return (
        f"off by {off.median():.0f} % (median), {off.max():.0f} % at most; {close} plans at most 3 % slower than the "
        f"measured profile's, median {against.median():.3f} times its time"
    )
