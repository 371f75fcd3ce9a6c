"""The check of the learning rate over all updates."""

import math

from utils.preflight.job import FAIL, PASS, WARN, Finding, Job, Steps

POINTS = 2000  # at most this many updates are looked at
COLUMNS, LEVELS = 36, " .:-=+*#"  # of the plot in one line
NO_RATE = 1e-3  # of the peak: as good as nothing (a cosine's last 2% are)
LARGE_SCALE = 4.0  # times the reference batch, from which a warm-up is needed
# Goyal et al. 2017 (arxiv.org/abs/1706.02677) scale up to 8192 = 32 x 256, beyond it degrades.
CEILING = 32.0
REMEDY = "let learning_rate(step) count updates (window.step) and reach its end at total_steps"


def schedule(job: Job) -> Steps:
    """The rate over all updates: linear rule, warm-up, an end that is reached at the end."""
    total = max((yield job.total_steps))
    steps = sorted({1 + round(i * (total - 1) / max(1, POINTS - 1)) for i in range(POINTS)})
    rates = {step: float(job.learning_rate(step)) for step in steps}
    scale = 1.0
    if job.flags.get("lr_reference_batch"):
        scale = job.plan.global_batch_size / job.flags["lr_reference_batch"]
    return judge_schedule(rates, job.rates_used, scale, job.final_rate)


def judge_schedule(
    rates: dict[int, float],
    used: dict[int, list[float]],
    scale: float,
    final_rate: float | None,
) -> Finding:
    """Of the rates by update.

    Args:
        used: what the optimizer was seen to use in an update.
        scale: by which the linear rule has multiplied the rate.
    """
    total, peak, last = max(rates), max(rates.values()), rates[max(rates)]
    plot = text_plot(rates)
    seen = f"peak {peak:g}, last {last:g}, {total} updates [{plot}]"
    if not all(math.isfinite(rate) and rate >= 0 for rate in rates.values()):
        bad = next(step for step, rate in rates.items() if not 0 <= rate < math.inf)
        return Finding(FAIL, f"the rate of update {bad} is {rates[bad]}", REMEDY)
    for step, (wanted, found) in {s: (rates.get(s), f) for s, f in used.items()}.items():
        if wanted is None or not found:
            continue
        nearest = min(
            found, key=lambda rate, wanted=wanted: abs(rate - wanted)
        )  # other groups have a factor
        if abs(nearest - wanted) > 1e-6 * peak:
            return Finding(
                FAIL,
                f"the optimizer used {nearest:g} in update {step}, learning_rate says {wanted:g}",
                "set the optimizer's rate in `update` from learning_rate(window.step)",
            )
    if total == 1:
        return Finding(PASS, f"one update, rate {last:g}")
    if peak == 0:
        return Finding(FAIL, "the rate is 0 in all updates: nothing is learnt", "raise --lr")
    at_peak = min(step for step, rate in rates.items() if rate == peak)
    after = {step: rate for step, rate in rates.items() if step > at_peak}
    lowest = min(after.values(), default=peak)
    if last > lowest + 0.5 * peak:
        return Finding(FAIL, f"{seen}: it falls, then rises again to the end", REMEDY)
    if final_rate is not None and any(rate != peak for rate in rates.values()):
        if abs(last - final_rate) > 0.01 * peak:
            return Finding(FAIL, f"{seen}: the end value {final_rate:g} is not reached on the "
                           "last update", REMEDY)  # fmt: skip
    idle = [step for step, rate in after.items() if rate < NO_RATE * peak]
    if len(idle) > 1 and (total - min(idle)) > 0.04 * total:
        return Finding(
            FAIL, f"{seen}: it ends early, at nothing from update {min(idle)} on", REMEDY
        )
    if scale > CEILING:
        return Finding(
            WARN,
            f"{seen}; --lr was multiplied by {scale:g} for the batch, beyond the usual ceiling "
            f"of {CEILING:g}",
            "a smaller --global-batch-size or --lr; or --lr-reference-batch 0 and a rate found "
            "by trying",
        )
    if scale >= LARGE_SCALE and rates[1] > 0.5 * peak:
        return Finding(
            WARN,
            f"{seen}; no warm-up although the batch multiplies --lr by {scale:g}",
            "--warmup-fraction 0.05 or more",
        )
    return Finding(PASS, seen)


def text_plot(rates: dict[int, float]) -> str:
    """The rate from the first to the last update, in one line."""
    steps, peak = sorted(rates), max(rates.values()) or 1.0
    columns = min(COLUMNS, len(steps))
    values = [rates[steps[i * (len(steps) - 1) // max(1, columns - 1)]] for i in range(columns)]
    return "".join(LEVELS[min(7, math.ceil(7 * max(0.0, v) / peak))] for v in values)
