"""Times the scheduler of vLLM V1 on the loads of scheduler_step.py. Runs in a virtual environment that has vLLM.

    python benchmarks/peers_vllm_scheduler.py '{"running": 256, "ending": 0.02, …}'

The argument is one load as JSON, with the fields that scheduler_step.py's `Load` has, plus `steps`, `seed`,
`block_size`, `num_blocks`, `max_tokens`, `token_budget`, `vocab_size`, `eos`. The last line printed is a JSON object.
Timed are making a Request and `add_request` for what arrives (prompts are hashed there, as they are named in our timed
part), `schedule()` and `update_from_output()`. Not timed, in vLLM's favour: turning its outputs into bytes, which is
timed on our side.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig, set_current_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

WARM_UP_STEPS = 30
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "max_position_embeddings": 65536,
    "torch_dtype": "float32",
}


def make_scheduler(load: dict[str, Any], folder: Path) -> Scheduler:
    (folder / "config.json").write_text(json.dumps(MODEL | {"vocab_size": load["vocab_size"]}))
    longest = 2 * load["prompt"] + load["max_tokens"]
    block_size = load["block_size"]
    cache = CacheConfig(block_size=block_size, gpu_memory_utilization=0.5, enable_prefix_caching=True)
    cache.num_gpu_blocks = load["num_blocks"]
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, max_model_len=longest, dtype="float32"),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=load["running"],
            max_num_batched_tokens=load["token_budget"],
            max_model_len=longest,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
    )
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=4, head_size=16, dtype=torch.float32)
    pool = KVCacheConfig(load["num_blocks"], [], [KVCacheGroupSpec(["layer"], spec)])
    with set_current_vllm_config(config):
        return Scheduler(config, pool, StructuredOutputManager(config), block_size=block_size, log_stats=False)


class Driver:
    """Keeps ``running`` requests going; the sampled tokens are random. As the Driver of scheduler_step.py."""

    def __init__(self, load: dict[str, Any], scheduler: Scheduler) -> None:
        self.load, self.scheduler = load, scheduler
        self.random = np.random.default_rng(load["seed"])
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(load["block_size"], sha256)
        self.encoder = MsgpackEncoder()
        self.number = self.ended = 0

    def new_prompt(self) -> tuple[list[int], SamplingParams]:
        load = self.load
        length = int(self.random.integers(load["prompt"] // 2, load["prompt"] * 3 // 2))
        prompt = self.random.integers(10, load["vocab_size"], length).tolist()
        sampling = SamplingParams(temperature=1.0, max_tokens=load["max_tokens"], stop_token_ids=[3, 4])
        sampling.update_from_generation_config({}, load["eos"])
        return prompt, sampling

    def submit(self, prompt: list[int], sampling: SamplingParams) -> None:
        self.number += 1
        name = f"request-{self.number}"
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self.hasher))

    def answer(self, output: Any, ending: float) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        tokens = self.random.integers(10, self.load["vocab_size"], len(ids))
        tokens[self.random.random(len(ids)) < ending] = self.load["eos"]
        # A request whose prompt is not computed to its end samples nothing.
        requests = self.scheduler.requests
        sampled = [
            [token] if requests[name].num_computed_tokens >= requests[name].num_tokens else []
            for name, token in zip(ids, tokens.tolist(), strict=True)
        ]
        return ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, sampled)

    def step(self, ending: float) -> tuple[float, float, float, float]:
        """Seconds of wall clock in schedule and update, the latter with encoding; of processor time in both; and in
        encoding."""
        live = len(self.scheduler.running) + len(self.scheduler.waiting)
        arrivals = [self.new_prompt() for _ in range(self.load["running"] - live)]
        wall, cpu = time.perf_counter(), time.thread_time()
        for prompt, sampling in arrivals:
            self.submit(prompt, sampling)
        output = self.scheduler.schedule()
        schedule, cpu_schedule = time.perf_counter() - wall, time.thread_time() - cpu
        result = self.answer(output, ending)
        before = len(self.scheduler.running)
        wall, cpu = time.perf_counter(), time.thread_time()
        outputs = self.scheduler.update_from_output(output, result)
        made = time.perf_counter()
        for client in outputs.values():
            self.encoder.encode(client)
        ended = time.perf_counter()
        update, cpu_update = ended - wall, time.thread_time() - cpu
        self.ended += before - len(self.scheduler.running)
        self.decoding = len(result.req_ids) == output.total_num_scheduled_tokens == self.load["running"]
        return schedule, update, cpu_schedule + cpu_update, ended - made


def main() -> None:
    load = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        driver = Driver(load, make_scheduler(load, Path(folder)))
    driver.decoding = False
    while not driver.decoding:
        driver.step(0.0)
    for _ in range(WARM_UP_STEPS):
        driver.step(load["ending"])
    driver.ended = 0
    gc.collect()
    gc.freeze()
    gc.disable()
    times = np.array([driver.step(load["ending"]) for _ in range(load["steps"])]) * 1e6
    schedule, update, cpu, encode = np.median(times, axis=0)
    total = times[:, 0] + times[:, 1]
    print(
        json.dumps(
            {
                "version": vllm.__version__,
                "schedule_us": round(float(schedule), 1),
                "update_us": round(float(update), 1),
                "encode_us": round(float(encode), 1),
                "total_us": round(float(np.median(total)), 1),
                "p99_us": round(float(np.percentile(total, 99)), 1),
                "total_cpu_us": round(float(cpu), 1),
                "ended_per_step": round(driver.ended / load["steps"], 2),
            }
        )
    )


if __name__ == "__main__":
    main()
