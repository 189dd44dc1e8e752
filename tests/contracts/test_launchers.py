"""Every launcher: it renders on a machine that has none of its tools, and writes no secret."""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from fortyfold.launch.contract import Launcher, load_launcher
from fortyfold.spec import plugin

NAMES = plugin.names("fortyfold.launch.kinds")
CANARY = "canary-9f86d081884c7d65"
KEYS = {
    "slurm": 'partition = "gpu"\ntime_limit = "10:00"\n',
    "pbs": 'queue = "gpu"\ntime_limit = "10:00"\n',
    "ssh": 'hosts = ["one", "two"]\n',
}


@pytest.mark.parametrize("name", NAMES)
def test_it_has_the_contracts_functions(name: str) -> None:
    launcher = load_launcher(name)
    for function in ("render", "submit", "run", "state", "cancel", "shell"):
        ours = list(inspect.signature(getattr(launcher, function)).parameters)
        assert ours == list(inspect.signature(getattr(Launcher, function)).parameters)[1:], function
    assert launcher.BATCH in (True, False)


@pytest.mark.parametrize("name", [name for name in NAMES if name in KEYS])
def test_a_dry_run_needs_no_tools_writes_nothing_and_tells_no_secret(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fortyfold: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for secret in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(secret, CANARY)
    secrets = "" if name == "pbs" else 'secrets = ["WANDB_API_KEY", "HF_TOKEN"]\n'
    text = f'[there]\nkind = "{name}"\n{secrets}{KEYS[name]}'
    (tmp_path / "sites.toml").write_text(text)
    for how in ([], ["--interactive"]):
        code, out, err = fortyfold("train", "tiny", "--on", "there", "--nodes", 2, "--dry-run", *how)
        assert (code, err) == (0, "") and "python" in out
        assert CANARY not in out
    assert [path.name for path in tmp_path.iterdir()] == ["sites.toml"]


@pytest.mark.parametrize("name", [name for name in NAMES if name in KEYS])
def test_a_missing_tool_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fortyfold: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "sites.toml").write_text(f'[there]\nkind = "{name}"\n{KEYS[name]}')
    code, _, err = fortyfold("train", "tiny", "--on", "there", "--nodes", 2)
    assert code == 2 and err.count("\n") == 1 and "there is no " in err
    code, out, _ = fortyfold("sites", "check", "there")
    assert code == 2 and out.startswith("there: there is no ")
