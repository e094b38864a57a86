"""One engine in a process of its own: reads jobs as JSON lines, answers each with one.

Runs in this project's environment (ours, transformers) and in vLLM's, so it imports neither at the top.
Token ids in, counts and times out: no tokenizer's or template's doing is measured.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

Arrival = list[Any]  # [seconds after the start, token ids, new tokens]


class Watch:
    """Notes when each request's tokens come."""

    def __init__(self, count: int) -> None:
        self.times: list[list[float]] = [[] for _ in range(count)]
        self.began = time.perf_counter()

    def note(self, number: int, tokens: int) -> None:
        """`tokens` tokens of request `number` have come."""
        self.times[number] += [time.perf_counter() - self.began] * tokens

    def report(self, due: list[float]) -> dict[str, Any]:
        """Times to first token, counted from when each was `due`, and between tokens."""
        gaps = [b - a for one in self.times for a, b in zip(one, one[1:], strict=False)]
        return {
            "seconds": max(one[-1] for one in self.times),
            "tokens": sum(map(len, self.times)),
            "first_s": [one[0] - at for one, at in zip(self.times, due, strict=True)],
            "gaps_s": gaps,
        }


class Ours:
    """LoadOnce's engine thread, fed through its inbox as the link feeds it."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        from broker import protocol
        from broker.logs import Log
        from gpu_worker import exchange, loading
        from gpu_worker.engine import Engine
        from gpu_worker.runner import Runner
        from gpu_worker.sampler import Sampler
        from gpu_worker.settings import WorkerSettings

        torch.set_num_threads(os.cpu_count() or 1)
        self._protocol, self._exchange, self._torch = protocol, exchange, torch
        settings = WorkerSettings(**options)
        log = Log("bench", level="warning")
        self.baseline = rss_bytes()
        self.loaded = loading.load(settings, torch.device("cpu"), log)
        self.runner = Runner(self.loaded, settings, log)
        self.runner.warm_up()
        self.runner.start_compile()
        self._ended = threading.Event()
        self._watch: Watch | None = None
        self._open: set[str] = set()
        self._sampler: Any = Sampler(self.loaded.device, self.loaded.vocab)
        self.engine = Engine(self.loaded, settings, self.runner, self._emit, log, sampler=self._sampler)
        self._wait_for_compile(settings)
        self._seconds = {"forward": 0.0, "sampling": 0.0, "step": 0.0}
        self._lost: list[tuple[int, int]] = []
        self._measure_parts()
        threading.Thread(target=self.engine.run, daemon=True).start()

    def _wait_for_compile(self, settings: Any) -> None:
        until = time.monotonic() + 300
        while settings.compile and self.runner._compiled is None and time.monotonic() < until:
            time.sleep(0.2)

    def _measure_parts(self) -> None:
        """Put clocks around the parts of a step."""

        def timed(name: str, function: Any) -> Any:
            def call(*given: Any) -> Any:
                began = time.perf_counter()
                try:
                    return function(*given)
                finally:
                    self._seconds[name] += time.perf_counter() - began

            return call

        engine: Any = self.engine
        self.runner.forward = timed("forward", self.runner.forward)
        self._sampler.sample = timed("sampling", self._sampler.sample)
        step = timed("step", engine.step)

        def step_and_count() -> None:
            step()
            running = [s for s in engine._scheduler if s.pages]
            owned = sum(len(s.pages) for s in running) * self.runner.page_tokens
            self._lost.append((owned - sum(len(s.token_ids) for s in running), owned))

        engine.step = step_and_count

    def _emit(self, output: Any) -> None:
        watch = self._watch
        assert watch is not None, "output without a request"
        for id, _, tokens in output.chunks:
            watch.note(int(id.split("/")[1]), tokens)
        for _, problem in output.failed:
            raise problem
        self._open -= {id for id, _ in output.finished}
        if not self._open:
            self._ended.set()

    def play(self, arrivals: list[Arrival]) -> dict[str, Any]:
        """Generate for each arrival when it is due; returns times."""
        protocol, run = self._protocol, self._exchange.Run
        name = str(time.monotonic_ns())
        bodies = [
            protocol.encode(
                protocol.Request(
                    token_ids=ids, params=protocol.Params(max_tokens=new, temperature=0, ignore_eos=True)
                )
            )
            for _, ids, new in arrivals
        ]
        self._open = {f"{name}/{number}" for number in range(len(arrivals))}
        self._ended.clear()
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._lost.clear()
        steps = self.engine.counters.steps
        self._watch = watch = Watch(len(arrivals))
        for number, (due, _, _) in enumerate(arrivals):
            time.sleep(max(0.0, watch.began + due - time.perf_counter()))
            self.engine.inbox.put(run(f"{name}/{number}", f"{name}/{number}", bodies[number]))
        if not self._ended.wait(600):
            raise TimeoutError("the engine doesn't finish")
        answer = watch.report([due for due, _, _ in arrivals])
        seconds = self._seconds
        answer["steps"] = self.engine.counters.steps - steps
        answer["parts_s"] = {
            "forward": seconds["forward"],
            "sampling": seconds["sampling"],
            "python": seconds["step"] - seconds["forward"] - seconds["sampling"],
        }
        owned = sum(owned for _, owned in self._lost)
        answer["lost_share"] = sum(lost for lost, _ in self._lost) / owned if owned else 0.0
        return answer

    def kernels(self, arrivals: list[Arrival]) -> dict[str, Any]:
        """Share of the forward pass that each kind of kernel takes, by torch's profiler."""
        everywhere = self._torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with self._torch.profiler.profile(experimental_config=everywhere) as profile:
            self.play(arrivals)
        times = {event.key: event.self_cpu_time_total / 1e6 for event in profile.key_averages()}
        return {name: times.get(f"loadonce::{name}", 0.0) for name in ("attend", "linear", "linear_nf4")}

    def memory(self) -> dict[str, Any]:
        """Bytes of this process, and of what it has to hold."""
        cache = sum(t.untyped_storage().nbytes() for pair in self.runner._caches for t in pair)
        return {
            "rss": rss_bytes(),
            "before_loading": self.baseline,
            "weights": self.loaded.weights_bytes,
            "cache": cache,
        }

    def folder(self) -> str:
        """Where the model is that was loaded."""
        return str(self.loaded.config._name_or_path)


class VLLM:
    """vLLM's CPU build, its engine in this process and stepped by hand."""

    def __init__(self, options: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        llm = LLM(
            options["model"], dtype="bfloat16", max_model_len=8192, max_num_seqs=64, disable_log_stats=True
        )
        self._engine = llm.llm_engine

    def play(self, arrivals: list[Arrival]) -> dict[str, Any]:
        """Generate for each arrival when it is due; returns times."""
        name = str(time.monotonic_ns())
        watch, seen, coming = Watch(len(arrivals)), [0] * len(arrivals), 0
        while coming < len(arrivals) or self._engine.has_unfinished_requests():
            now = time.perf_counter() - watch.began
            while coming < len(arrivals) and arrivals[coming][0] <= now:
                _, ids, new = arrivals[coming]
                params = self._params(temperature=0, max_tokens=new, ignore_eos=True)
                self._engine.add_request(f"{name}/{coming}", {"prompt_token_ids": ids}, params)
                coming += 1
            if not self._engine.has_unfinished_requests():
                time.sleep(max(0.0, arrivals[coming][0] - now))
                continue
            for output in self._engine.step():
                number = int(output.request_id.split("/")[1].split("-")[0])
                tokens = len(output.outputs[0].token_ids)
                watch.note(number, tokens - seen[number])
                seen[number] = tokens
        return watch.report([due for due, _, _ in arrivals])


class Transformers:
    """transformers' own `generate` and `generate_batch`, over weights loaded as ours are."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        from broker.logs import Log
        from gpu_worker import loading
        from gpu_worker.settings import WorkerSettings

        torch.set_num_threads(os.cpu_count() or 1)
        self._torch = torch
        settings = WorkerSettings(**options)
        self._model = loading.load(settings, torch.device("cpu"), Log("bench", level="warning")).model

    def play(self, arrivals: list[Arrival]) -> dict[str, Any]:
        """All at once, in one batch: prompts and outputs must be of one length."""
        ids = self._torch.tensor([ids for _, ids, _ in arrivals])
        new = arrivals[0][2]
        began = time.perf_counter()
        with self._torch.inference_mode():
            self._model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        return {"seconds": time.perf_counter() - began, "tokens": new * len(arrivals)}


def rss_bytes() -> int:
    """Memory of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def main() -> None:
    """Answer jobs until standard input ends."""
    kind, options = sys.argv[1], json.loads(sys.argv[2])
    # Answers have a channel that no library prints to.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine: Any = {"ours": Ours, "vllm": VLLM, "transformers": Transformers}[kind](options)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer("ready")
    for line in sys.stdin:
        job = json.loads(line)
        if job["do"] == "cpu":
            answer(time.process_time())
        else:
            answer(getattr(engine, job["do"])(*job.get("with", [])))


if __name__ == "__main__":
    main()
