"""SGLang behind the protocol of minite/sampler/engine.py."""

from __future__ import annotations

import base64
import json
import math
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minite.backends.registry import get_backend
from minite.config import env
from minite.config.plan import PrecisionPlan
from minite.config.schema import RunConfig
from minite.errors import UserError
from minite.sampler.embedded.sampling import request_seed
from minite.sampler.engine import Completion, EngineStats, Request
from minite.sampler.gate import UpdateGate
from minite.sampler.limits import check_request
from minite.sampler.sglang import launch, proof, shards
from minite.sampler.sglang.compat import checked, compat
from minite.sampler.sglang.processes import make_engine
from minite.sampler.sglang.server import make_server
from minite.sampler.sglang.watching import RequestPass
from minite.sampler.sglang.wire import DISK, VERSION, WATCH
from minite.sync import disk
from minite.sync.clock import Clock
from minite.sync.errors import SyncError
from minite.sync.flat import DATA, INDEX, flatten, text
from minite.types import WeightVersion


class SglangEngine:
    """See ``minite.sampler.engine.Engine``, which it implements: over sglang.Engine, or over SGLang's HTTP server with
    ``sampler.server``, whose client has the same methods. ProcessDied when that server is gone or broken.

    Must be built, and used, in the main thread of its process; ``abort`` may come from another thread.
    """

    def __init__(self, run_config: RunConfig, plan: PrecisionPlan, device: str) -> None:
        self.config, self.plan, self.device, self.compat = run_config, plan, device, compat()
        launch.check(run_config, device)
        shards.check(plan, run_config.model, run_config.sampler.tensor_parallel)
        env.apply_sglang_env(device, run_config.sampler.tensor_parallel)
        self.backend = get_backend(plan.backend, device=device, strict=False).name
        with tempfile.TemporaryDirectory(prefix="minite-sglang-") as folder:  # read while SGLang starts, not later
            for name, content in launch.model_files(run_config, plan, device, Path(folder)).items():
                (Path(folder) / name).write_text(content, encoding="utf-8")
            options = launch.arguments(run_config, plan, device, Path(folder))
            if run_config.sampler.server:
                self.sglang: Any = make_server(options, run_config.driver.timeout)
            else:
                self.sglang = make_engine(options)
        self._stats = EngineStats()
        self._gate = UpdateGate(plan.digest)
        self._live: dict[str, Request] = {}
        self._generating = threading.Lock()
        self._clock = Clock()  # of the last weight update
        try:
            proof.check(self.states(), plan, self.backend, None)
        except BaseException:
            self.close()  # whoever catches this has no engine to close
            raise

    def states(self) -> list[dict[str, Any]]:
        """What every scheduler process says of itself, miniTE's proof under "minite"."""
        return proof.states(self.sglang.get_server_info())

    # -- generation ---------------------------------------------------------------------------------------------------

    def generate(self, requests: list[Request]) -> list[Completion]:
        """Run the requests to their end; completions in request order. UserError for a request that cannot be run."""
        version = self._gate.require("generate")
        if not requests:
            return []
        if not self._generating.acquire(blocking=False):
            raise UserError("generate is already running; hand all requests to one call, or wait for it")
        try:
            for request in requests:
                check_request(request, self._live, self.config.model, self.config.sampler)
                self._live[request.request_id] = request
            answers = self.sglang.generate(
                input_ids=[list(r.prompt_tokens) for r in requests],
                sampling_params=[self._parameters(r) for r in requests],
                rid=[r.request_id for r in requests],
                return_logprob=True,
                return_routed_experts=bool(self.config.model.num_experts),
            )
            return [self._complete(r, a, version) for r, a in zip(requests, answers, strict=True)]
        finally:
            self._live.clear()
            self._generating.release()

    def _parameters(self, request: Request) -> dict[str, Any]:
        params = request.params
        if params.top_k == 1 and params.temperature > 0:
            raise UserError(f"request {request.request_id!r}: top_k 1 is greedy; say temperature 0 instead")
        seed = request_seed(self.config.seed, request.request_id) if params.seed is None else params.seed % 2**64
        return {
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "stop_token_ids": list(params.stop_token_ids),
            "sampling_seed": seed - 2**64 if seed >= 2**63 else seed,  # the same 64 bits, signed
        }

    def _complete(self, request: Request, answer: Mapping[str, Any], version: WeightVersion) -> Completion:
        info, tokens = answer["meta_info"], list(answer["output_ids"])
        self._count(request, tokens, info["finish_reason"]["type"])
        record = info.get("routed_experts")  # none for a dense model, and for a request aborted before it ran
        return Completion(
            request_id=request.request_id,
            prompt_tokens=request.prompt_tokens,
            tokens=tokens,
            logprobs=[
                math.nan if entry[0] is None else float(entry[0])  # JSON has no other word for it
                for entry in info.get("output_token_logprobs", ())
            ],
            finish_reason=info["finish_reason"]["type"],
            weight_version=version,
            routed_experts=None if record is None else self._experts(record),
        )

    def _experts(self, record: str) -> Tensor:
        """SGLang's record, int32 in base64 -> int16 [prompt + response - 1, MoE layers, k]."""
        model = self.config.model
        flat = np.frombuffer(base64.b64decode(record), dtype=np.int32).astype(np.int16)
        return torch.from_numpy(flat).view(-1, model.num_layers, model.experts_per_token)

    def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """End live requests, keeping what they have generated. Returns how many were live.

        One that SGLang has not yet taken, in the moment after ``generate`` was called, runs to its end all the same.
        """
        live = set(self._live)
        chosen = live if request_ids is None else live & set(request_ids)
        for request_id in chosen:
            self.sglang.abort(request_id)
        return len(chosen)

    # -- weights ------------------------------------------------------------------------------------------------------

    def begin_update(self, version: WeightVersion) -> None:
        """Start loading new weights; the old ones are gone from here on. SyncError while requests are live."""
        if self._gate.incoming is not None:  # its sender gave up half-way: the session of SGLang is still open
            with suppress(SyncError):  # unless SGLang has closed it, which it then says
                self.compat.end_update(self.sglang)
        self._gate.announce(version, len(self._live))
        self._clock = Clock()
        self.compat.begin_update(self.sglang)
        self._gate.incoming = version
        self._send({VERSION: text(json.dumps(asdict(version)))})

    def load_bucket(self, tensors: Mapping[str, Tensor]) -> None:
        """Pass the tensors of one bucket on, on the wire or plain. What is wrong with them shows in finish_update."""
        self._gate.under_way("load_bucket")
        self._send(tensors)

    def finish_update(self) -> str:
        """Close the update, forget all cached prefixes, and have every scheduler prove what it holds."""
        with self._gate.finishing() as version:
            with self._clock.timed("flush"):
                self.compat.end_update(self.sglang)
                checked(self.sglang.flush_cache, "flush_cache")  # after the last change: no stale prefix survives
            with self._clock.timed("prove"):
                states = self.states()
            proof.check(states, self.plan, self.backend, version)
        self._stats.weight_updates += 1
        self._stats.update_seconds = self._phases(states)
        return version.weight_digest

    def update_from_disk(self, directory: str | Path, step: int = 0) -> str:
        """A whole update from a directory of `minite convert`, which the schedulers read themselves and verify."""
        self.begin_update(disk.announced(directory, step))
        self._send({DISK: text(str(Path(directory).absolute()))})
        return self.finish_update()

    def join(self, group: str, address: str, port: int, first_rank: int, world_size: int, backend: str) -> None:
        """Have the schedulers join a process group, as ``first_rank`` and the ranks after it; rank 0 sends weights.

        Blocks until all ranks are there.
        """
        checked(
            self.sglang.init_weights_update_group,
            "init_weights_update_group",
            master_address=address,
            master_port=port,
            rank_offset=first_rank,
            world_size=world_size,
            group_name=group,
            backend=backend,
        )

    def load_broadcast(self, group: str, sizes: tuple[int, int]) -> None:
        """``load_bucket`` of what rank 0 of a group broadcasts: DATA, then INDEX of a flat bucket, of so many bytes."""
        self._gate.under_way("load_broadcast")
        with self._clock.timed("transfer"):
            checked(
                self.sglang.update_weights_from_distributed,
                "update_weights_from_distributed",
                names=[DATA, INDEX],
                dtypes=["uint8", "uint8"],
                shapes=[[size] for size in sizes],
                group_name=group,
                flush_cache=False,
            )

    def weight_version(self) -> WeightVersion | None:
        """Version of the weights in use; None when there are none that may be used."""
        return self._gate.version

    def _send(self, tensors: Mapping[str, Tensor]) -> None:
        with self._clock.timed("flatten"):
            flat = list(flatten(tensors).items())
        with self._clock.timed("transfer"):
            checked(
                self.sglang.update_weights_from_tensor,
                "update_weights_from_tensor",
                named_tensors=flat,
                load_format=launch.LOADER,
                flush_cache=False,
            )

    def _phases(self, states: list[dict[str, Any]]) -> dict[str, float]:
        """Seconds of an update by phase. Phases inside of the schedulers are no transfer; the slowest one counts."""
        inside = [state["minite"]["seconds"] for state in states]
        phases = {phase: max(seconds[phase] for seconds in inside) for phase in inside[0]}
        seconds = self._clock.seconds
        return seconds | {"transfer": seconds["transfer"] - sum(phases.values())} | phases

    @contextmanager
    def watched(self) -> Iterator[list[RequestPass]]:
        """Within the block the scheduler computes step by step, without CUDA graphs and fused expert kernels, and
        notes every operation; afterwards its passes are in the list. UserError for more than one process."""
        if self.config.sampler.tensor_parallel > 1:
            raise UserError("watching SGLang needs one process; add -o sampler.tensor_parallel=1")
        passes: list[RequestPass] = []
        with tempfile.TemporaryDirectory(prefix="minite-sglang-") as folder:
            path = Path(folder) / "passes.pt"
            self._tell({WATCH: text("")})
            try:
                yield passes
            finally:
                self._tell({WATCH: text(str(path))})
            passes += torch.load(path, weights_only=False)  # written a moment ago, by our own scheduler

    def _tell(self, message: Mapping[str, Tensor]) -> None:
        """A message outside of a weight update; SGLang has one way in for tensors."""
        self.compat.begin_update(self.sglang)
        self._send(message)
        self.compat.end_update(self.sglang)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters since the start and the gauges of now; the object is live."""
        self._stats.running = len(self._live)
        return self._stats

    def _count(self, request: Request, tokens: list[int], finish_reason: str) -> None:
        self._stats.requests += 1
        self._stats.generated_tokens += len(tokens)
        self._stats.prefill_tokens += len(request.prompt_tokens)
        self._stats.aborted += finish_reason == "abort"

    def close(self) -> None:
        """End SGLang's processes. Also done when this process ends."""
        self.sglang.shutdown()
