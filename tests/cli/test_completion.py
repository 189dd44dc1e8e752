"""Completion as a shell asks for it: through the script, or through the variable _FORTYFOLD_COMPLETE."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fortyfold.cli.completion import complete_key
from fortyfold.spec.recipe_file import built_in_names, load_recipe, parse_changes, settable_keys

Fortyfold = Callable[..., tuple[int, str, str]]

# As the program `fortyfold`, but it fails when answering took torch.
PROGRAM = f"""#!{sys.executable}
import sys
from fortyfold.cli.main import main
try:
    main()
finally:
    if {{"torch", "timm", "safetensors", "numpy"}} & set(sys.modules):
        print("heavy")
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With `fortyfold` on the PATH."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "fortyfold").write_text(PROGRAM)
    (folder / "fortyfold").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def ask(environment: dict[str, str], shell: str, line: str) -> list[str]:
    """What typer's script for `shell` gets for a command line that ends at the cursor."""
    words = line.split(" ")
    own = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_TYPER_COMPLETE_ARGS": line}
    asked = {**own, "_TYPER_COMPLETE_FISH_ACTION": "get-args", "_FORTYFOLD_COMPLETE": f"complete_{shell}"}
    done = subprocess.run(["fortyfold"], env={**environment, **asked}, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "fish"])
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fortyfold train ", built_in_names()),
        ("fortyfold recipes show smo", ["smoke"]),
        ("fortyfold train tiny --set optim.lay", ["optim.layer_decay=", "optim.layer_decay=VALUE"]),
        ("fortyfold train tiny --set epochs=3 --set data.demo.p", ["data.demo.px=", "data.demo.px=VALUE"]),
        ("fortyfold recipes show x.toml --set phases.1.p", ["phases.1.px=", "phases.1.px=VALUE"]),
        ("fortyfold train ./mine", []),
        ("fortyfold --show-completion z", ["zsh"]),
    ],
)  # fmt: skip
def test_recipes_and_keys_are_completed(
    environment: dict[str, str], shell: str, line: str, expected: list[str]
) -> None:
    assert ask(environment, shell, line) == expected


def test_verbs_are_completed_in_zsh(environment: dict[str, str]) -> None:
    answer = " ".join(ask(environment, "zsh", "fortyfold rec"))
    assert answer.startswith('_arguments \'*: :(("recipes"') and "heavy" not in answer


def test_the_script_works_in_bash(environment: dict[str, str]) -> None:
    script = """
        eval "$(fortyfold --show-completion bash)"
        complete -p fortyfold
        COMP_WORDS=(fortyfold train tiny --set schedule.p) COMP_CWORD=4
        _fortyfold_completion fortyfold schedule.p --set
        echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-euc", script], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert done.stdout == ("complete -o default -F _fortyfold_completion fortyfold\nschedule.power= schedule.peak=\n")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_script_is_one_of_its_shell(environment: dict[str, str], shell: str) -> None:
    script = subprocess.run(
        ["fortyfold", "--show-completion", shell], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert f"_FORTYFOLD_COMPLETE=complete_{shell}" in script and "heavy" not in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("shell", "place"),
    [
        ("bash", ".bash_completions/fortyfold.sh"),
        ("zsh", ".zfunc/_fortyfold"),
        ("fish", ".config/fish/completions/fortyfold.fish"),
    ],
)
def test_it_is_installed_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fortyfold: Fortyfold, shell: str, place: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out, _ = fortyfold("--install-completion", shell)
    assert code == 0 and str(tmp_path / place) in out
    assert (tmp_path / place).read_text().strip() == fortyfold("--show-completion", shell)[1].strip()


def test_another_shell_is_one_line(fortyfold: Fortyfold) -> None:
    for option in ("--install-completion", "--show-completion"):
        code, _, err = fortyfold(option, "tcsh")
        assert code == 2 and err.count("\n") == 1
        assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in err


def test_every_key_that_is_offered_is_a_key() -> None:
    keys = settable_keys()
    assert {"epochs", "optim.lr", "data.demo.px", "phases.0.px", "model.arguments"} < set(keys)
    assert "optim" not in keys and "phases" not in keys and len(keys) == len(set(keys))
    assert complete_key("phases.12.l") == ["phases.12.lr=", "phases.12.lr=VALUE"]
    recipe = load_recipe("tiny", parse_changes([complete_key("schedule.warmup_e")[0] + "0.5"]))
    assert recipe.schedule.warmup_epochs == 0.5
