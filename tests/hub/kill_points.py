"""Run as a script: kills a conversion with SIGKILL at many points and prints what each left behind, as JSON.

One process imports everything once and forks a child per point. `events`: the child kills itself at its n-th file
system event (Python's audit hook), which visits all points between two changes of the disk. `random`: the parent kills
the child after a random time.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from modeling_mrp.hub import convert

_WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.copyfile", "os.chmod")


def child(source: Path, target: Path, kill_at: int | None) -> None:
    count = 0

    def hook(event: str, _: tuple) -> None:
        nonlocal count
        if event in _WATCHED:
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    convert.convert_checkpoint(source, target, max_shard_size="40KB")
    (target.parent / "events").write_text(str(count))
    os._exit(0)


def run(source: Path, target: Path, kill_at: int | None = None, after: float | None = None) -> float:
    start = time.monotonic()
    process = os.fork()
    if process == 0:
        try:
            child(source, target, kill_at)
        finally:
            os._exit(1)
    if after is not None:
        time.sleep(after)
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return time.monotonic() - start


def state(target: Path) -> dict:
    files = sorted(path.name for path in target.iterdir()) if target.exists() else None
    return {"files": files, "leftovers": len(list(target.parent.glob(f".{target.name}.*")))}


def main() -> None:
    source, work, points, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    target = work / "out"
    run(source, target)  # warm caches, count events
    complete, events = state(target), int((work / "events").read_text())
    shutil.rmtree(target)
    took = run(source, target)
    shutil.rmtree(target)
    draw = random.Random(seed)
    results = []
    plan = [("event", draw.randint(1, events)) for _ in range(points // 2)]
    plan += [("random", draw.uniform(0, 1.1 * took)) for _ in range(points - len(plan))]
    for kind, point in plan:
        run(source, target, **({"kill_at": point} if kind == "event" else {"after": point}))
        results.append({"kind": kind, "point": point, **state(target)})
        shutil.rmtree(target, ignore_errors=True)
    run(source, target)
    print(json.dumps({"complete": complete, "events": events, "results": results, "after": state(target)}))


if __name__ == "__main__":
    main()
