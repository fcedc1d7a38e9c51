"""slime's train.py under a Ray of its own: slime_start.py RUNTIME_ENV GPUS TRAIN_PY [arguments]

`minite launch` hands a job to a Ray that is up and has a dashboard. Where neither is, this does the same in one process
with the same files of a launch. RUNTIME_ENV is its runtime_env.yaml; the caller's PYTHONPATH comes after the one in it.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import sys
from pathlib import Path

import ray
import yaml

RETURNED = "slime_start: train.py returned"
SECONDS_TO_END = 60  # after that the stacks are told: something keeps the process


def main() -> None:
    runtime_env, gpus, script, *arguments = sys.argv[1:]
    environment = yaml.safe_load(Path(runtime_env).read_text(encoding="utf-8"))
    paths = [environment["env_vars"]["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]
    environment["env_vars"]["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path[:0] = paths[0].split(os.pathsep)
    os.environ.update(environment["env_vars"])
    ray.init(num_cpus=8, num_gpus=int(gpus), include_dashboard=False, runtime_env=environment)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    print(RETURNED, flush=True)
    faulthandler.dump_traceback_later(SECONDS_TO_END, exit=True)
    ray.shutdown()
    print("slime_start: Ray is down", flush=True)


if __name__ == "__main__":
    main()
