"""`--preflight`: the script's own model, data, loss and update, checked on its own machines.

preflight.check_memory(accelerator, model, optimizer)  # before `prepare`: raises if it cannot fit
job = preflight.Job(accelerator, model, optimizer, bn_plan, directory, asdict(cfg), built)
job.set_data(train_loader, test_loader, num_classes=10)
job.set_functions(update, compute_loss, learning_rate, evaluate)
if cfg.preflight:
    return preflight.check_all(job)   # prints and writes the report; 0, or 1 on a fail
preflight.check_start(job)            # the cheap part, at every start; raises on a fail
"""

from utils.preflight.checks import check_all, check_start
from utils.preflight.job import Job
from utils.preflight.memory import check_memory
from utils.preflight.state import fingerprint

__all__ = ["Job", "check_all", "check_memory", "check_start", "fingerprint"]
