"""The built-in engine: continuous batching over one model, verified weights, nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from minite.backends.registry import get_backend
from minite.config.plan import PrecisionPlan
from minite.config.schema import RunConfig
from minite.errors import UserError
from minite.layers import ops
from minite.sampler.embedded.graphs import DecodeGraphs
from minite.sampler.embedded.kv_cache import Decode, KVCache, Prefill, Score
from minite.sampler.embedded.model import Model
from minite.sampler.embedded.sampling import BatchParams, request_seed, sample, uniform
from minite.sampler.embedded.scheduler import Scheduler, Sequence
from minite.sampler.engine import Completion, EngineStats, Request
from minite.sampler.gate import UpdateGate
from minite.sync.clock import Clock
from minite.sync.transport import MANIFEST, from_wire, read_manifest
from minite.types import WeightVersion

PREFILL_TOKENS = 16_384  # prompts prefilled together [tokens]: bounds activations, large enough to fill a GPU
SCORE_LOGITS = 2**27  # logits held together when whole sequences are scored: 512 MiB in FP32


class EmbeddedEngine:
    """See ``minite.sampler.engine.Engine``, which it implements.

    ``generate`` runs in the caller's thread; ``abort`` may come from another one, or from ``progress``, which is
    called with the statistics after every step.
    """

    def __init__(
        self,
        run_config: RunConfig,
        plan: PrecisionPlan,
        device: torch.device | str,
        progress: Callable[[EngineStats], None] | None = None,
    ) -> None:
        self.config, self.plan, self.device, self.progress = run_config, plan, torch.device(device), progress
        model, sampler = run_config.model, run_config.sampler
        strict = plan.alignment == "strict"
        backend = get_backend(plan.backend, device=self.device, strict=strict)
        self.model = Model(plan, model, backend, self.device)
        self.cache = KVCache(model, plan.kv_cache, sampler.kv_tokens, self.model.dtype, self.device)
        self.scheduler = Scheduler(sampler, model, PREFILL_TOKENS)
        self.scale = model.head_dim**-0.5
        graphed = self.model.step_by_step() is None
        self.graphs = DecodeGraphs(self.model, self.cache, self.scale, sampler.max_batch) if graphed else None
        self._params: tuple[list[Sequence], BatchParams] | None = None  # of the sequences last sampled
        self._stats = EngineStats()
        self._gate = UpdateGate(plan.digest)
        self._manifest: dict[str, str] | None = None
        self._clock = Clock(self.device)
        self._abort: set[str] = set()
        self._abort_lock = threading.Lock()
        self._generating = threading.Lock()

    # -- generation ---------------------------------------------------------------------------------------------------

    def generate(self, requests: list[Request]) -> list[Completion]:
        """Run the requests to their end; completions in request order. UserError for a request that cannot be run."""
        self._gate.require("generate")
        if not self._generating.acquire(blocking=False):
            raise UserError("generate is already running; hand all requests to one call, or wait for it")
        try:
            self.scheduler.add([Sequence(r, self._seed(r)) for r in requests])
            self._stats.requests += len(requests)
            done: dict[str, Completion] = {}
            while self.scheduler.busy:
                for sequence in self._step():
                    done[sequence.request.request_id] = self._complete(sequence)
                if self.progress is not None:
                    self.progress(self.stats())
            return [done[r.request_id] for r in requests]
        finally:
            self.scheduler.abort(self.scheduler.live_ids())  # none, unless a step or progress raised
            self._generating.release()

    def logprobs(self, sequences: list[list[int]]) -> Iterator[Tensor]:
        """What the model thinks of given tokens: for each sequence the log-probs of all but its first token. [nats]

        At temperature 1; [length - 1] float32 on the CPU, float64 in strict mode. No request and no cache is touched.
        """
        return (logprob_T for logprob_T, _ in self.scores(sequences))

    def scores(self, sequences: list[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """``logprobs``, and with them whether a token is the likeliest: [length - 1] bool on the CPU."""
        self._gate.require("score")
        limit = min(PREFILL_TOKENS, SCORE_LOGITS // self.config.model.vocab_size)
        batch: list[list[int]] = []
        for i, sequence in enumerate(sequences):
            batch.append(sequence)
            if i + 1 == len(sequences) or sum(map(len, batch)) + len(sequences[i + 1]) > limit:
                yield from self._score(batch)
                batch = []

    @torch.inference_mode()
    def _score(self, batch: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
        length_S = self._tensor([len(sequence) for sequence in batch])
        cu_seqlens = torch.nn.functional.pad(length_S.cumsum(0), (1, 0))
        token_T = self._tensor([token for sequence in batch for token in sequence])
        attend = Score(self.cache, cu_seqlens, self.scale, self.model.strict, self.model.fused)
        logits_TV, _ = self.model.forward(token_T, self._positions(length_S), attend, None)
        logprob_T = ops.token_logprob(logits_TV[:-1], token_T[1:], self.model.strict).cpu()
        likeliest_T = (logits_TV[:-1].argmax(-1) == token_T[1:]).cpu()
        ends = cu_seqlens.tolist()
        return [(logprob_T[a : b - 1], likeliest_T[a : b - 1]) for a, b in zip(ends, ends[1:], strict=False)]

    @torch.inference_mode()
    def _step(self) -> list[Sequence]:
        """One prefill of new requests or one decode of all running ones. Returns the requests that ended."""
        ended = self._apply_aborts()
        admitted = self.scheduler.admit()
        batch = admitted or self.scheduler.running
        assert batch or ended, "requests wait although nothing runs: an idle cache has room for any request let in"
        if batch:
            logits_BV = self._prefill(batch) if admitted else self._decode(batch)
            self._sample(batch, logits_BV)
        return ended + self.scheduler.retire()

    def _prefill(self, batch: list[Sequence]) -> Tensor:
        """Prompts, packed end to end, equal ones once. Logits after the last token of each request's prompt: [B, V]."""
        index = {prompt: i for i, prompt in enumerate(dict.fromkeys(s.request.prompt_tokens for s in batch))}
        prompt_B = self._tensor([index[s.request.prompt_tokens] for s in batch])
        length_P = self._tensor([len(prompt) for prompt in index])
        cu_seqlens = torch.nn.functional.pad(length_P.cumsum(0), (1, 0))
        token_T = self._tensor([token for prompt in index for token in prompt])
        position_T = self._positions(length_P)
        length_B = length_P[prompt_B]
        position_N = self._positions(length_B)
        source_N = cu_seqlens[prompt_B].repeat_interleave(length_B) + position_N
        slot_N = self._tensor([s.start for s in batch]).repeat_interleave(length_B) + position_N
        attend = Prefill(self.cache, cu_seqlens, source_N, slot_N, self.scale, self.model.strict, self.model.fused)
        logits_PV, expert_TLk = self.model.forward(token_T, position_T, attend, cu_seqlens[1:] - 1)
        if expert_TLk is not None:
            self.cache.experts[slot_N] = expert_TLk[source_N]
        self._stats.prefill_tokens += len(token_T)
        return logits_PV[prompt_B]

    def _decode(self, batch: list[Sequence]) -> Tensor:
        """One token more for each. Logits after it: [B, V], valid until the next step."""
        self._stats.decode_steps += 1
        lengths = [s.length for s in batch]
        if self.graphs is not None and self.model.fused is not None:
            slots = [s.start + length - 1 for s, length in zip(batch, lengths, strict=True)]
            return self.graphs.decode([s.tokens[-1] for s in batch], lengths, slots)
        length_B, start_B = self._tensor(lengths), self._tensor([s.start for s in batch])
        slot_B = start_B + length_B - 1
        span_L = torch.arange(max(lengths), device=self.device)
        slot_BL = (start_B[:, None] + span_L).clamp(max=self.cache.slots - 1)
        attend = Decode(self.cache, slot_B, slot_BL, length_B, self.scale, self.model.strict, self.model.fused)
        token_B = self._tensor([s.tokens[-1] for s in batch])
        logits_BV, expert_BLk = self.model.forward(token_B, length_B - 1, attend, None)
        if expert_BLk is not None:
            self.cache.experts[slot_B] = expert_BLk
        return logits_BV

    def _sample(self, batch: list[Sequence], logits_BV: Tensor) -> None:
        """Draw the next token of every sequence and append it."""
        if self._params is None or self._params[0] != batch:  # a batch stays the same over many steps
            made = BatchParams.of([s.request.params for s in batch], logits_BV.shape[1], self.device)
            self._params = (list(batch), made)
        params = self._params[1]
        seed_B = np.array([s.seed for s in batch], dtype=np.uint64)
        position_B = np.array([s.length for s in batch], dtype=np.uint64)
        uniform_B = torch.from_numpy(uniform(seed_B, position_B)).to(self.device)
        token_B, logprob_B = sample(logits_BV, params, uniform_B, self.model.strict)
        for sequence, token, logprob in zip(batch, token_B.tolist(), logprob_B.tolist(), strict=True):
            sequence.append(token, logprob)
        self._stats.generated_tokens += len(batch)

    def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """End live requests at the next step, keeping what they have generated. Returns how many were live."""
        live = self.scheduler.live_ids()
        chosen = live if request_ids is None else live & set(request_ids)
        with self._abort_lock:
            self._abort |= chosen
        return len(chosen)

    def _apply_aborts(self) -> list[Sequence]:
        with self._abort_lock:
            ids, self._abort = self._abort, set()
        ended = self.scheduler.abort(ids) if ids else []
        self._stats.aborted += len(ended)
        return ended

    def _complete(self, sequence: Sequence) -> Completion:
        assert sequence.finish_reason is not None
        experts = None
        if self.config.model.num_experts and sequence.start >= 0:
            experts = self.cache.read_experts(sequence.start, sequence.length - 1)
        request = sequence.request
        return Completion(
            request.request_id, request.prompt_tokens, sequence.tokens, sequence.logprobs, sequence.finish_reason,
            self._gate.require("generate"), experts,
        )  # fmt: skip

    # -- weights ------------------------------------------------------------------------------------------------------

    def begin_update(self, version: WeightVersion) -> None:
        """Start loading new weights; the old ones are gone from here on. SyncError while requests are live."""
        self._gate.announce(version, len(self.scheduler.live_ids()))
        self._gate.incoming, self._manifest, self._clock = version, None, Clock(self.device)
        self.model.weights.loaded.clear()

    def load_bucket(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors of one bucket, on the wire or plain. SyncError names one that does not belong."""
        self._gate.under_way("load_bucket")
        with self._clock.timed("load"):
            named = from_wire(tensors)
            manifest = named.pop(MANIFEST, None)
            if manifest is not None:
                self._manifest = read_manifest(manifest)
            self.model.weights.load(named)

    def finish_update(self) -> str:
        """Verify what is held and make it usable. Returns its digest; SyncError when it is not the announced one."""
        with self._gate.finishing() as version:
            with self._clock.timed("verify"):
                held = self.model.weights.verify(version.weight_digest, self._manifest)
            with self._clock.timed("prepare"):
                self.model.prepare()
        self._stats.weight_updates += 1
        self._stats.update_seconds = self._clock.seconds
        return held

    def weight_version(self) -> WeightVersion | None:
        """Version of the weights in use; None when there are none that may be used."""
        return self._gate.version

    # -- the rest -----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters since the start and the gauges of now; the object is live."""
        self._stats.running = len(self.scheduler.running)
        self._stats.kv_tokens_used = self.scheduler.ranges.used
        return self._stats

    def close(self) -> None:
        """Nothing of it runs outside of this process."""

    def _seed(self, request: Request) -> int:
        seed = request.params.seed
        return request_seed(self.config.seed, request.request_id) if seed is None else seed % 2**64

    def _positions(self, length_S: Tensor) -> Tensor:
        """0 .. length - 1 of each of the packed sequences, end to end."""
        end_S = length_S.cumsum(0)
        return torch.arange(int(end_S[-1]), device=self.device) - (end_S - length_S).repeat_interleave(length_S)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
