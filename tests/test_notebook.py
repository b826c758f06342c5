"""The quickstart from its first cell to its last, and what only notebooks have: progress below a cell, interrupts."""

import queue
import time

import nbformat
import pytest
from jupyter_client import AsyncKernelManager, KernelManager
from launch import ROOT
from nbclient import NotebookClient
from ports import free_port

QUICKSTART = ROOT / "docs" / "examples" / "quickstart.ipynb"
CHANNELS = ("shell", "iopub", "stdin", "hb", "control")
PORTS = lambda: {"cache_ports": False, **{f"{name}_port": free_port() for name in CHANNELS}}  # nobody else takes them


@pytest.mark.slow
def test_the_quickstart_runs_from_its_first_cell_to_its_last(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # EnvPool's Jumanji sets it where it draws, as other tests ask
    notebook = nbformat.read(QUICKSTART, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "is kept without what it printed"
    where = {"metadata": {"path": tmp_path}}
    manager = AsyncKernelManager(kernel_name="python3", **PORTS())
    client = NotebookClient(notebook, km=manager, timeout=900, startup_timeout=300, resources=where)
    client.execute(cleanup_kc=True)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = lambda words: next(cell.outputs for cell in code if words in cell.source)
    progress = [x for x in outputs('run_dir="runs/quickstart"') if x.output_type == "display_data"]
    assert len(progress) == 1 and "<progress" in progress[0].data["text/html"]
    assert "\x1b" not in str(outputs('run_dir="runs/quickstart"')), "no panel of a terminal's"
    assert any("image/png" in x.data for x in outputs("plt.plot"))
    mean, _ = eval(outputs("played.mean")[-1].data["text/plain"])
    assert mean > 100
    assert float(outputs("gymnasium.make")[-1].data["text/plain"]) > 50
    assert "<video" in outputs("Video(")[-1].data["text/html"]
    assert outputs("two-devices")[-1].data["text/plain"] == "True"
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {"quickstart", "one-device", "two-devices"}


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A notebook's kernel, and what waits for its answers."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    manager = KernelManager(kernel_name="python3", **PORTS())
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=600)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


DEFINED = """
import gymnasium, numpy as np, cleanba

class Line(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.at = max(0, self.at + (1 if action else -1))
        return np.array([min(self.at, 5) / 5], np.float32), -1.0, self.at >= 5, False, {}

small = dict(num_envs=4, num_steps=8, num_actors=1, num_shards=1, hiddens=[8], num_minibatches=1, update_epochs=1)
"""
ENDLESS = (
    """cleanba.train(cleanba.ppo(Line, total_timesteps=32 * 10**6, env_epoch=20, **small), "runs/a", log_frequency=1)"""
)
AGAIN = """
run = cleanba.train(cleanba.ppo(Line, total_timesteps=64, **small), "runs/b")
(cleanba.Run("runs/a").result["status"], run.result["status"], run.agent().act(np.zeros(1)) in (0, 1))
"""


def answer(client, code: str, until=None) -> tuple[dict, str]:
    """Run a cell -> the kernel's reply, and all that was shown below it.  `until` is called with each message."""
    shown = []
    request = client.execute(code)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            message = client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        if message["parent_header"].get("msg_id") != request:
            continue
        shown.append(str(message["content"]))
        if until is not None:
            until(shown[-1])
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            while (reply := client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != request:
                pass  # an answer to something before
            return reply["content"], "\n".join(shown)
    pytest.fail("\n".join(shown))


@pytest.mark.slow
def test_interrupting_the_kernel_ends_a_run_of_a_class_of_the_notebook_and_leaves_the_kernel_usable(kernel, tmp_path):
    manager, client = kernel
    assert answer(client, DEFINED)[0]["status"] == "ok"
    pressed = []

    def press(content: str) -> None:
        if "update " in content and "<progress" in content and not pressed:
            pressed.append(manager.interrupt_kernel())

    reply, shown = answer(client, ENDLESS, press)
    assert pressed and (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt"), shown
    assert "the same call goes on after update" in reply["evalue"]  # no command knows its class
    assert "local/Line-v0 is defined in the running program" in shown
    reply, shown = answer(client, AGAIN)
    assert reply["status"] == "ok" and "('interrupted', 'finished', True)" in shown, shown
