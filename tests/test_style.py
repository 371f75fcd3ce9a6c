"""What every script has in common, so that a reader who knows one knows all."""

import ast
import importlib
import re
import shlex
from dataclasses import fields

import pytest
import tyro

from tests.conftest import REPOSITORY
from utils.backends import SUMMARIES
from utils.plots import PANELS

SCRIPTS = sorted((REPOSITORY / "train").glob("*.py"))
UTILS = sorted((REPOSITORY / "utils").rglob("*.py"))
BOOTSTRAP = (
    "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))"
    "  # repo root: utils/ needs no install"
)
GUARD = """if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Config, description=__doc__)))
"""
ORDER = ("class Config", "def count_valid", "def compute_loss", "def evaluate", "def main")
BANNERS = "Setup Data Model Optimizer Prepare Resume Train Finish".split()
MINIMAL_LINES = 130  # without banners: short enough to be read without them

every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)


def test_there_are_scripts():
    assert {"minimal.py", "cifar.py"} <= {path.name for path in SCRIPTS}


@every_script
def test_sections_stand_in_the_same_order(script):
    text = script.read_text()
    places = [text.index(f"\n{part}") for part in ORDER]
    assert places == sorted(places)
    body = text[places[-1] :]
    assert "    def update(window: Window) -> Totals:" in body
    banners = re.findall(r"^ +# ---- (\w+) -", body, flags=re.MULTILINE)
    if len(text.splitlines()) > MINIMAL_LINES:
        assert banners == BANNERS
    assert text.endswith(GUARD)
    assert text.count(BOOTSTRAP) == 1


@every_script
def test_length(script):
    assert len(script.read_text().splitlines()) <= 450


@every_script
def test_every_flag_explains_itself(script):
    config = importlib.import_module(f"train.{script.stem}").Config
    common = (REPOSITORY / "utils" / "flags.py").read_text()
    lines = (script.read_text() + common).splitlines()
    for field in fields(config):
        line = next(line for line in lines if line.startswith(f"    {field.name}: "))
        assert re.search(r"  # \w.{5,}", line), f"{field.name} has no comment of its own"


@every_script
def test_commands_of_the_docstring_parse(script):
    module = importlib.import_module(f"train.{script.stem}")
    commands = [
        line.split("#")[0].strip()
        for line in module.__doc__.splitlines()
        if line.startswith("    ") and script.name in line
    ]
    assert any(command.startswith("python ") for command in commands)
    assert any(command.startswith("accelerate launch ") for command in commands)
    for command in commands:
        words = shlex.split(command)
        at = words.index(f"train/{script.name}")
        for word in words[:at]:
            assert not word.endswith(".yaml") or (REPOSITORY / word).exists(), word
        tyro.cli(module.Config, args=words[at + 1 :])


@every_script
def test_flow_is_visible(script):
    """Nobody has to open a util to see how a script trains."""
    text = script.read_text()
    for call in (
        "open_accelerator(",
        "convert_batchnorm(",
        "accelerator.prepare(",
        "with accelerator.accumulate(model):",
        "accelerator.backward(",
        "accelerator.clip_grad_norm_(",
        "optimizer.step()",
        "bn_plan.update_running_statistics()",
        "optimizer.zero_grad()",
    ):
        assert call in text, call
    assert "on_main_process(lambda: export" not in text  # export_model is entered by all processes
    assert text.index("convert_batchnorm(model") < text.index("torch.optim.")
    assert text.index("torch.optim.") < text.index("accelerator.prepare(")


@pytest.mark.parametrize("path", UTILS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_utils_know_nothing_of_the_scripts(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(name.name.startswith("train") for name in node.names)
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("train")
        if isinstance(node, ast.arg):
            assert node.arg != "cfg"


def test_readme_names_every_script_and_config():
    readme = (REPOSITORY / "README.md").read_text()
    for script in SCRIPTS:
        assert f"train/{script.name}" in readme, script.name
    configs = (REPOSITORY / "accelerate_configs" / "README.md").read_text()
    for path in (REPOSITORY / "accelerate_configs").glob("*.yaml"):
        assert path.name in configs, path.name


def test_documented_metrics_are_the_logged_ones():
    documented = (REPOSITORY / "train" / "README.md").read_text()
    for script in SCRIPTS:
        for key in re.findall(r'"((?:train|val|perf|data)/\w+)"', script.read_text()):
            assert f"`{key}`" in documented, key


def test_what_the_table_tells_is_drawn_too():
    told = {
        key for path in SCRIPTS for key in re.findall(r'metrics\["(val/\w+)"\]', path.read_text())
    }
    told -= {"val/classes_present"}  # what another figure is of
    assert len(told) > 4
    assert told <= {key for keys, _, _ in PANELS for key in keys}
    assert told <= SUMMARIES.keys()


def test_no_leftovers():
    for path in [*SCRIPTS, *UTILS]:
        assert not re.search(r"TODO|FIXME|XXX|breakpoint\(\)", path.read_text()), path.name
