"""Why a module call may not run a second time, as far as one run can show, and what a person can do about it."""

from __future__ import annotations

from profiler.trace.step_record import Call

# What was dropped would be made again while forward goes on, and then be kept by the graph of that backward.
GOES_BACKWARD = "the forward goes backward through it (for forces, or a penalty on gradients)"
_HOST_RANDOM = "it draws from Python's or numpy's random generator"
_WAITS = "the head in it waits for its loss, and runs in pieces with it"
_FILLS_LATE = "an op in it saves a tensor for backward before it fills it (rrelu its noise)"
_FOREIGN_CHANGE = "it changes a parameter, or a buffer of another module"


def why_not_recomputable(call: Call) -> str:
    """Why a second run would not be the same; empty where nothing speaks against it."""
    return _obstacle(call)[0]


def remedy_for(call: Call) -> str:
    """What to change in the model, or in its settings, so that the call may run again; empty where it may."""
    return _obstacle(call)[1]


def _obstacle(call: Call) -> tuple[str, str]:
    """Reason and remedy."""
    if call.waits:
        return _WAITS, ""
    if call.mutates_input:
        return "it changes its input in place", "write the result into a new tensor (x = x + y for x += y)"
    if call.opaque or call.fills:
        return _holder(call)
    if call.scripted:
        reason = f"{call.scripted} is compiled by torch.jit, and saves other tensors in its first runs than later"
        return reason, "use the module as it was before torch.jit"
    if not call.outputs:
        return "it returns no tensor", "return its tensors, in a tuple, a dict or a dataclass"
    if call.fills_late:
        return _FILLS_LATE, "use leaky_relu for rrelu, or draw the noise with torch.rand"
    if call.goes_backward:
        remedy = "where that is a penalty, compute it in a step of its own: the gradients of both add up"
        return GOES_BACKWARD, f"{remedy}; for forces, take the batch in smaller pieces"
    if call.hides:
        reason = f"{call.hides} keeps tensors for backward in attributes of its context, where no hook can drop them"
        return reason, "have the function save them (ctx.save_for_backward); of bitsandbytes take a 4-bit base"
    if call.side_effect:
        return call.side_effect, _SIDE_EFFECTS.get(call.side_effect, "")
    return "", ""


_SIDE_EFFECTS = {
    _HOST_RANDOM: "draw with torch.rand and its like, whose state is put back for a second run",
    _FOREIGN_CHANGE: "change it between steps, or keep it in a buffer of the module itself",
}


def _holder(call: Call) -> tuple[str, str]:
    remedy = "pass its tensors in a tuple, a dict or a dataclass"
    if "Cache" in call.fills + call.opaque:
        remedy = "pass no cache (use_cache=False)"
    if call.fills:
        return f"it puts tensors into a {call.fills} that it is given and does not return", remedy
    return f"it passes a {call.opaque} that holds tensors, which a second run could not be given as they were", remedy
