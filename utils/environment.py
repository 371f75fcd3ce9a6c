"""What this machine runs: versions of packages, and the commit of this repository."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torchvision", "accelerate", "datasets", "numpy", "wandb")


def environment() -> dict[str, Any]:
    """Versions and the git commit of this repository, for config.json."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    root = Path(__file__).resolve().parents[1]
    try:
        git = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
        )
        commit = git.stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        commit = None
    return {"versions": versions, "git_commit": commit}
