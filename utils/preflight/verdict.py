"""What the figures of the gradient's check mean: the clearest cause first, and its remedy."""

from typing import Any

from utils.distributed import world_size
from utils.preflight.job import FAIL, NOT_CHECKED, PASS, WARN, Finding, Job

# Relative errors of a parameter's gradient: SMALL whatever rounding does; MOST_NOISE what rounding
# alone may do (tenfold, see NOISE) for a larger error to tell anything.
SMALL, MOST_NOISE = 1e-3, 3e-2
SLOPE = 1e-2
SCALING = (
    "multiply the SUM of a micro-batch's losses by window.scale, and give it to "
    "accelerator.backward: nothing else may weigh it"
)


def judge_gradient(everyone: list[dict[str, Any]], processes: int, micro_steps: int, job: Job):
    """From each rank's facts (see _strict), the clearest cause first."""
    facts = everyone[0]
    if facts["sum"] is not None and abs(facts["sum"] - 1) > 1e-3:
        return Finding(
            FAIL,
            f"the loss of a batch is {facts['sum']:.3g} times that of its halves together",
            "compute_loss must return the SUM of the losses (reduction='sum'), not their mean",
        )
    if facts["steps"] != 1:
        return Finding(
            FAIL,
            f"{facts['steps']} optimizer steps in one update of {micro_steps} micro-steps",
            "set accelerator.gradient_accumulation_steps = plan.accumulation, and step within "
            "`with accelerator.accumulate(model)`",
        )
    if facts["random"]:
        return Finding(NOT_CHECKED, "the model draws random numbers that could not be turned off")
    for rank, answer in enumerate(everyone):
        if answer["checksum"] != facts["checksum"]:
            return Finding(
                FAIL,
                f"rank {rank} steps with another gradient than rank 0: they are not synchronised",
                "no no_sync() but the one within accelerator.accumulate(model); call `model`, as "
                "accelerator.prepare returned it, never the unwrapped one in training",
            )
    if facts["missing"]:
        return Finding(
            FAIL,
            f"'{facts['missing'][0]}' has a gradient in the one and none in the other",
            "the update must use the same parts of the model in every process",
        )
    worst = max(everyone, key=lambda answer: answer["excess"])
    if job.comm_hook == "no" and not worst["excess"] <= 1:
        seen = f"'{worst['name']}' is {worst['error']:.1e} off the truth in one process"
        ratio, rest = worst["ratio"], worst["rest"]
        if rest < 1e-3 * abs(1 - ratio) or rest < 1e-4:
            return Finding(FAIL, f"the gradient is {ratio:.4g} times the truth", _scale(ratio, job))
        remedy = SCALING
        if micro_steps > 1:
            remedy += "; no zero_grad between micro-steps"
        if job.bn_plan.ranks_sharing > 1:
            remedy += "; if it is right: BatchNorm is not synchronised as the plan says"
        return Finding(FAIL, seen, remedy)
    if worst["left_out"] > worst["count"] / 2:
        return Finding(
            NOT_CHECKED,
            f"rounding alone moves {worst['left_out']} of {worst['count']} gradients by more than "
            f"{MOST_NOISE:g}",
            "normalise the inputs; a larger --bn-group",
        )
    slope = max((a["slope"] for a in everyone if a["slope"] is not None), default=0.0)
    if slope > SLOPE and worst["shaky"] <= worst["count"] / 2:  # else the loss itself wavers
        return Finding(
            WARN,
            f"the gradient is not the slope of the loss ({slope:.0%} off)",
            "a detach() or no_grad() on the way from the weights to the loss: take it out, unless "
            "it is meant (a stop-gradient)",
        )
    hook = f" ({job.comm_hook} hook: loosely below)" if job.comm_hook != "no" else ""
    where = f"{world_size()} processes x {micro_steps} micro-steps"
    seen = f"{where} as in one process: {worst['largest']:.0e} off at most{hook}"
    if worst["noisy"]:
        seen += (
            f"; rounding alone moves {worst['noisy']} of {worst['count']} gradients by more than "
            f"{SMALL:g}, in which less than {10 * MOST_NOISE:.0%} could hide"
        )
    return Finding(PASS, seen)


def _scale(ratio: float, job: Job) -> str:
    plan = job.plan
    known = [
        (1 / plan.accumulation, "accumulation is divided twice: accelerator.backward does it"),
        (plan.accumulation, "the accumulation is not divided: use accelerator.backward"),
        (1 / plan.num_processes, "the processes are divided twice: DDP does it"),
        (plan.num_processes, "the loss is summed over the processes twice"),
    ]
    fitting = [text for f, text in known if f != 1 and abs(ratio - f) < 1e-3 * f]
    return "; ".join([" or ".join(fitting), SCALING]) if fitting else SCALING
