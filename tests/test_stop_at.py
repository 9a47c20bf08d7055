"""--stop-at: a run ends once it is good enough, and leaves what a run leaves."""

import pytest
from toy_env import Letters, flags, options, read_metrics, serve, train_main


class Learned(Letters):
    """Its tasks are solved once eight episodes have ended: after the first evaluation."""

    played = 0

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        type(self).played += terminated
        solved = terminated and self.played > 8
        return observation, reward, terminated, truncated, info | {"success": solved}


class Easy(Learned):
    played = 100


@pytest.mark.parametrize(("world", "last"), [(Learned, 1), (Easy, 0)])
def test_a_run_ends_saved_once_held_out_success_is_reached(tmp_path, capsys, world, last):
    with serve(world) as url:
        changes = dict(steps=3, eval_every=1, eval_samples=1, save_every=3, stop_at=0.9)
        settings = options(tmp_path, url, **changes)
        assert train_main(flags(**settings)) == 0
        said = capsys.readouterr().out
        assert "held-out success 100.0% has reached --stop-at 0.9" in said and "done: " in said
        best = tmp_path / "run/checkpoints/best"
        assert best.resolve().name == f"step_{last:06d}"
        if not last:
            return
        assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1]
        again = ["--resume", "--run-dir", str(tmp_path / "run")]
        assert train_main(again) == 0, "a resumed one has nothing left to do"
        assert "has reached --stop-at" in capsys.readouterr().out
        assert len(read_metrics(tmp_path / "run")) == 1
