"""scripts/slime_job.py as far as no GPU is needed: its files, its words, its reading of slime's log, its router."""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import pass_through_router
import slime_job
from transformers import AutoTokenizer

from minite.config import load_recipe

LOG = """
(RolloutManager pid=1) [x.py:1] rollout 0: {'rollout/raw_reward': 0.5, 'rollout/gap/abs_mean': 0.01}
(MegatronTrainRayActor pid=2) [model.py:9] step 0: {'train/ppo_kl': nan, 'train/loss': -inf}
(MegatronTrainRayActor pid=2) [model.py:9] step 1: {'train/ppo_kl': 0.25}
(RolloutManager pid=1) [x.py:1] rollout 1: {'rollout/raw_reward': 0.75}
rollout 2: {not python}
"""


@pytest.fixture
def serve():
    """Starts servers in threads; ends them."""
    servers = []

    def start(server):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


class Engine(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked.get("fail"):
            self.send_error(418)
            return
        body = json.dumps({"path": self.path, "asked": asked, "port": self.server.server_address[1]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args): ...


def ask(url, data=None, method=None):
    body = None if data is None else json.dumps(data).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, method=method), timeout=30) as answer:
        return json.loads(answer.read())


def test_the_router_drops_no_field_and_uses_all_engines(serve):
    router = serve(pass_through_router.Router(0))
    with pytest.raises(urllib.error.HTTPError, match="503"):
        ask(f"{router}/generate", {})
    engines = [serve(ThreadingHTTPServer(("127.0.0.1", 0), Engine)) for _ in range(2)]
    names = [ask(f"{router}/workers", {"url": url, "worker_type": "regular"})["worker_id"] for url in engines]
    assert [worker["url"] for worker in ask(f"{router}/workers")["workers"]] == engines
    wish = {"input_ids": [1, 2], "return_routed_experts": True, "no one knows": {"this": 1}}
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda i: ask(f"{router}/generate", {**wish, "i": i}), range(64)))
    assert [answer["asked"] for answer in answers] == [{**wish, "i": i} for i in range(64)]
    assert {answer["path"] for answer in answers} == {"/generate"} and len({a["port"] for a in answers}) == 2
    with pytest.raises(urllib.error.HTTPError, match="418"):
        ask(f"{router}/generate", {"fail": 1})
    ask(f"{router}/workers/{names[0]}", method="DELETE")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask(f"{router}/workers/{names[0]}", method="DELETE")
    assert {ask(f"{router}/generate", wish)["port"] for _ in range(4)} == {int(engines[1].rsplit(":", 1)[1])}


def test_the_router_names_an_engine_that_is_gone(serve):
    router = serve(pass_through_router.Router(0))
    ask(f"{router}/workers", {"url": "http://127.0.0.1:9"})
    with pytest.raises(urllib.error.HTTPError, match="502") as caught:
        ask(f"{router}/generate", {})
    assert "127.0.0.1:9" in caught.value.read().decode()


def test_the_job_is_one_that_launch_accepts(tmp_path, monkeypatch):
    recipe = slime_job.make(tmp_path / "job", [])
    config = load_recipe(recipe)
    assert config.slime.quantization == "minite" and config.precision.alignment == "aligned"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "job/bf16")
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "job/prompts.jsonl").read_text().splitlines()]
    assert len(tokenizer) == config.model.vocab_size and len(prompts) >= config.algo.prompts_per_step
    for prompt in prompts:
        ids = tokenizer(prompt)["input_ids"]
        assert len(ids) == len(prompt) and tokenizer.decode(ids).replace(" ", "") == prompt
    (tmp_path / "train.py").touch()
    args = argparse.Namespace(slime_dir=str(tmp_path), megatron_dir=None)
    words = slime_job.launch(recipe, tmp_path / "launch", args, ["driver.steps=3"], resume=False)
    assert words[0] == str(tmp_path / "train.py") and words[words.index("--num-rollout") + 1] == "3"
    assert all(word.strip() == word for word in words)
    assert words[words.index("--custom-rm-path") + 1] == "slime_job_reward.even"
    assert "--use-rollout-routing-replay" in words and (tmp_path / "launch/runtime_env.yaml").exists()


def test_what_slime_logged_is_read_by_rollout():
    found = slime_job.metrics(LOG)
    first = {"rollout/raw_reward": 0.5, "rollout/gap/abs_mean": 0.01, "train/ppo_kl": None, "train/loss": -math.inf}
    assert found[0] == first
    assert found[1] == {"rollout/raw_reward": 0.75} and set(found) == {0, 1}
    text = slime_job.table(found)
    assert "rollout/raw_reward" in text and "0.75" in text and "nan" in text
