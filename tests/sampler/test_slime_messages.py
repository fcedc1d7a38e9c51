"""slime's colocated updater with our messages in it, into the state of a scheduler: slime and SGLang stand aside."""

import json
from types import SimpleNamespace

import pytest
import torch
from plain_model import build
from tiny_engine import MOE, config

from minite.errors import UserError
from minite.learner.hf import initial_tensor
from minite.models import get_model
from minite.sync.errors import SyncError
from minite.sync.export import pack
from slime_plugin import proving


class Chunks:
    """slime's iterator: converted weights, some at a time."""

    def __init__(self, tensors):
        self.tensors, self.reads = tensors, 0

    def get_hf_weight_chunks(self, weights, **options):
        self.reads += 1
        names = sorted(self.tensors)
        for start in range(0, len(names), 7):
            yield [(name, self.tensors[name]) for name in names[start : start + 7]]


class Updater:
    """The part of slime's UpdateWeightFromTensor that the subclass meets; sends into a scheduler's state."""

    def __init__(self, tensors, receive):
        self._hf_weight_iterator, self.receive = Chunks(tensors), receive
        self._expert_transfer_plan, self.use_distribute, self.rank, self.weight_version = [], False, 0, 0
        self.rollout_engines = ["engine"]

    def update_weights(self):
        self.weight_version += 1
        for chunk in self._hf_weight_iterator.get_hf_weight_chunks(None):
            self._send_hf_params(chunk)

    def _send_hf_params(self, named):
        assert all(isinstance(tensor, torch.Tensor) for _, tensor in named)
        self.receive(dict(named))


@pytest.fixture
def parts(monkeypatch):
    cfg = config(MOE, "w4a4")
    state, model = build(cfg)
    shapes = get_model(cfg.model.kind).hf_tensors(cfg.model)
    named = [(name, initial_tensor(name, shape, 0.1, 0).bfloat16()) for name, shape in shapes.items()]
    tensors = {name: t for _, group in pack(state.plan, named, state.backend) for name, t in group.items()}
    told = [{"minite": [{**state.proof(), "missing_hooks": []}]}]  # replaced by every answer

    def answer(url, timeout):
        told[0]["minite"] = told[0]["minite"] and [{**state.proof(), "missing_hooks": []}]
        return SimpleNamespace(
            raise_for_status=lambda: None, json=lambda: json.loads(json.dumps({"internal_states": told}))
        )

    monkeypatch.setattr("requests.get", answer)
    monkeypatch.setattr("ray.get", lambda refs: refs)
    url = SimpleNamespace(get_url=SimpleNamespace(remote=lambda: "http://engine"))
    updater = proving.proving(Updater, state.plan, state.backend.name)(
        tensors, lambda named: state.receive(model, named)
    )
    updater.rollout_engines = [url]
    return updater, state, told


def test_two_updates_are_proven(parts):
    updater, state, _ = parts
    updater.update_weights()
    first = state.digest
    name = "model.norm.weight"
    updater._hf_weight_iterator.tensors[name] = updater._hf_weight_iterator.tensors[name] + 1
    updater.update_weights()
    assert state.digest == updater._hf_weight_iterator.version.weight_digest != first
    assert state.version.step == 2 and state.updates == 2


def test_weights_that_change_between_announcement_and_sending_stop_training(parts):
    updater, _, _ = parts
    chunks = updater._hf_weight_iterator._iterator
    real = chunks.get_hf_weight_chunks

    def other(weights, **options):
        for chunk in real(weights, **options):
            yield [(name, t + 1 if name == "model.norm.weight" and chunks.reads == 2 else t) for name, t in chunk]

    chunks.get_hf_weight_chunks = other
    with pytest.raises(SyncError, match="model.norm.weight"):
        updater.update_weights()


def test_an_engine_without_the_plugin_stops_training(parts):
    updater, _, told = parts
    told[0]["minite"] = None
    with pytest.raises(SyncError, match="plugin is not active"):
        updater.update_weights()


def test_experts_that_slime_would_send_apart_are_refused(parts):
    updater, _, _ = parts
    updater._expert_transfer_plan = ["layer 0"]
    with pytest.raises(UserError, match="--sglang-ep-size"):
        updater.update_weights()
