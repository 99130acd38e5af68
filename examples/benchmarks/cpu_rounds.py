"""CPU benchmark of whole rounds: SmolLM2-135M-Instruct in float32, beside transformers and economize.

Every method first has to give plain greedy decoding's tokens (near-ties of float32 are counted and reported); only
then its time counts. Times are of decoding: the prompt's forward, the same for all, is measured once per prompt and
taken off. Speeds are ratios within one run.

    python examples/benchmarks/cpu_rounds.py --prompts spec_bench.jsonl            # everything, one process
    python examples/benchmarks/cpu_rounds.py --prompts spec_bench.jsonl --part rag --save rag.json
    python examples/benchmarks/cpu_rounds.py --merge overhead.json summarization.json rag.json multi_turn.json

`--prompts` is Spec-Bench's question file. `economize` takes part if it is installed (0.3.2 was used).
"""

import argparse
import functools
import hashlib
import importlib.util
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor

from specdec import Candidates, Frontier, SpeculativeGenerator, control, drafters, trees
from specdec.protocols import DraftContext
from specdec.testing.smollm2 import load_smollm2

SETS = ("summarization", "rag", "multi_turn")
DRAFTERS = ("lookup", "suffix", "combined")
PEER_DRAFTS = 10

Method = Callable[[dict[str, Tensor]], Tensor]


def main() -> None:
    """Runs the parts asked for, or merges saved ones into the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--part", choices=("overhead", *SETS), action="append")
    parser.add_argument("--count", type=int, default=20, help="prompts per set")
    parser.add_argument("--skip", type=int, default=0, help="prompts to leave out at the start of a set")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--full", action="store_true", help="also verify the full tree in every round, uncontrolled")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", type=Path, help="write raw results here instead of the report")
    parser.add_argument("--merge", type=Path, nargs="+", help="saved raw results to make the report from")
    parser.add_argument("--revision", help="git revision, where there is no repository")
    arguments = parser.parse_args()
    if arguments.merge:
        raw = merged([json.loads(path.read_text(encoding="utf-8")) for path in arguments.merge])
    else:
        torch.set_num_threads(arguments.threads)
        model, tokenizer = load_smollm2()
        raw = {
            "device": f"{report.cpu_name()}, {arguments.threads} threads",
            "versions": {**report.installed(), **prompt_form(tokenizer)},
            "sets": {},
        }
        for part in arguments.part or ("overhead", *SETS):
            if part == "overhead":
                raw["overhead"] = overhead(model)
            else:
                prompts = spec_bench(arguments.prompts, part)[arguments.skip :][: arguments.count]
                for measured in measure_set(model, tokenizer, prompts, arguments.new_tokens, arguments.full):
                    raw["sets"][part] = measured
                    if arguments.save:  # after every prompt: a run that is cut off still counts
                        arguments.save.write_text(json.dumps(raw), encoding="utf-8")
    if arguments.save:
        arguments.save.write_text(json.dumps(raw), encoding="utf-8")
    else:
        report.write(
            "cpu-rounds", figures(raw), device=raw["device"], versions=raw["versions"], revision=arguments.revision
        )


def spec_bench(path: Path, name: str) -> list[list[str]]:
    """Turns of Spec-Bench prompts; `multi_turn` takes every fourth conversation of MT-Bench, over all its subjects."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if name == "multi_turn":
        return [row["turns"] for row in rows if len(row["turns"]) > 1][::4]
    return [row["turns"] for row in rows if row["category"] == name]


def prompt_form(tokenizer: Any) -> dict[str, str]:
    """What acceptance depends on beside the models: how prompts are put, and in which language."""
    digest = hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()
    return {"chat template": f"sha256 {digest[:12]}", "prompts": "in English"}


def measure_set(
    model: Any, tokenizer: Any, prompts: list[list[str]], new_tokens: int, full: bool
) -> Iterator[dict[str, Any]]:
    """Seconds, tokens and rounds of every method, summed over the prompts so far; yields after every prompt."""
    methods, generators = contestants(model, new_tokens, full)
    totals: dict[str, dict[str, Any]] = {name: defaultdict(float) for name in ("plain", *methods)}
    widths: dict[str, dict[str, int]] = {name: defaultdict(int) for name in generators}
    for inputs in conversations(model, tokenizer, prompts, new_tokens):
        prefill = seconds(lambda: model.generate(**inputs, max_new_tokens=1, do_sample=False))[0]  # noqa: B023 - called at once
        took, expected = seconds(lambda: model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False))  # noqa: B023 - as above
        fresh = expected.shape[1] - inputs["input_ids"].shape[1]
        _add(totals["plain"], took - prefill, fresh, fresh, 0)
        for name, method in methods.items():
            took, ids = seconds(lambda: method(inputs))  # noqa: B023 - as above
            same = ids.shape == expected.shape and bool((ids == expected).all())
            passes = generators[name].stats.target_passes if name in generators else 0
            new = ids.shape[1] - inputs["input_ids"].shape[1]
            _add(totals[name], took - prefill, new, passes, int(not same))
            if name in generators:
                for width, count in generators[name].stats.widths.items():
                    widths[name][str(width)] += count
        yield {"totals": totals, "widths": widths}


def _add(total: dict[str, Any], seconds: float, tokens: int, passes: int, different: int) -> None:
    # The first token comes from the prompt's own forward, whose time was taken off.
    for name, value in (
        ("seconds", seconds),
        ("tokens", tokens - 1),
        ("new", tokens),
        ("passes", passes),
        ("different", different),
    ):
        total[name] += value


def conversations(model: Any, tokenizer: Any, prompts: list[list[str]], new_tokens: int) -> Iterator[dict[str, Tensor]]:
    """Inputs of every turn; the answers before it are plain greedy decoding's."""
    for turns in prompts:
        messages: list[dict[str, str]] = []
        for place, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
            yield dict(inputs)
            if place + 1 < len(turns):
                ids = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
                text = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
                messages.append({"role": "assistant", "content": text})


def contestants(model: Any, new_tokens: int, full: bool) -> tuple[dict[str, Method], dict[str, SpeculativeGenerator]]:
    """Every method by name: the peers, ours with the goodput controller, and on request ours with the full tree."""
    made = {
        "lookup": lambda: drafters.PromptLookupDrafter(),
        "suffix": lambda: drafters.SuffixDrafter(),
        "combined": lambda: drafters.CombinedDrafter(drafters.PromptLookupDrafter(), drafters.SuffixDrafter()),
    }
    generators = {}
    for name, make in made.items():
        generators[name] = SpeculativeGenerator(model, make(), trees.BestFirst(nodes=15), controller=control.Goodput())
        if full:
            generators[f"{name}_full"] = SpeculativeGenerator(model, make(), trees.BestFirst(nodes=15))
    methods: dict[str, Method] = {
        "transformers": lambda inputs: model.generate(
            **inputs, max_new_tokens=new_tokens, do_sample=False, prompt_lookup_num_tokens=PEER_DRAFTS
        )
    }
    if importlib.util.find_spec("economize"):
        methods["economize"] = economize(model, new_tokens)
    for name, generator in generators.items():
        methods[name] = lambda inputs, generator=generator: generator.generate(
            **inputs, max_new_tokens=new_tokens, do_sample=False
        )
    return methods, generators


def economize(model: Any, new_tokens: int) -> Method:
    """Prompt lookup of economize, with as many drafts as transformers' gets.

    Its `generate` wants an older transformers; `decode` is its loop without that wrapper.
    """
    import economize  # type: ignore[import-not-found]  # optional
    from economize.techniques.lookup import LookupConfig  # type: ignore[import-not-found]  # optional

    wrapped = economize.apply(model, LookupConfig())
    decoding = economize.DecodeConfig(cycle_length=PEER_DRAFTS + 1)
    stop = model.generation_config.eos_token_id

    def run(inputs: dict[str, Tensor]) -> Tensor:
        prompt = inputs["input_ids"]
        answer = wrapped.decode(prompt, new_tokens, decoding=decoding, stop=stop)
        return torch.cat([prompt, answer.tokens[None]], 1)

    return run


class FullTree:
    """Three fixed proposals per node, so that every round verifies a whole tree; costs nothing to ask."""

    feature_layers: tuple[int, ...] = ()
    proposals = torch.tensor([11, 12, 13])
    log_probs = torch.tensor([0.5, 0.2, 0.1]).log()

    def start(self, context: DraftContext) -> None:
        """Nothing to prepare."""

    def children(self, frontier: Frontier, count: int) -> Candidates:
        """The same three tokens everywhere."""
        shape = (*frontier.tokens.shape, 3)
        return Candidates(self.proposals.expand(shape)[..., :count], self.log_probs.expand(shape)[..., :count])

    def commit(self, tokens: Tensor, counts: Tensor, features: Tensor | None = None) -> None:
        """Nothing to learn."""

    def finish(self) -> None:
        """Nothing to keep."""


class NoTree(FullTree):
    """Proposes nothing."""

    log_probs = torch.full((3,), -torch.inf)


def overhead(model: Any, rounds: int = 48) -> dict[str, float]:
    """The library's own time: idle rounds against plain generate, and its share of a round at verify width 16."""
    prompt = torch.randint(100, 20_000, (1, 256), generator=torch.Generator().manual_seed(0))
    request = {"max_new_tokens": rounds, "do_sample": False, "eos_token_id": None}
    idle = SpeculativeGenerator(model, NoTree(), trees.BestFirst(nodes=15))
    ours = plain = 0.0
    for _ in range(6):
        plain += seconds(lambda: model.generate(prompt, **request))[0]
        ours += 2 * seconds(lambda: idle.generate(prompt, **request))[0]
        plain += seconds(lambda: model.generate(prompt, **request))[0]
    short, long = (library_time(model, length, rounds) for length in (256, 4096))
    return {
        "idle_drafter_speed_ratio": plain / ours,
        "library_time_share.w16": short["library"] / short["forward"],
        "round_time_4096_over_256": long["library"] / short["library"],
        "whole_round_4096_over_256": (long["library"] + long["forward"]) / (short["library"] + short["forward"]),
        "library_ms.w16": 1000 * short["library"],
        "forward_ms.w16": 1000 * short["forward"],
    }


def library_time(model: Any, context: int, rounds: int) -> dict[str, float]:
    """Median seconds of a round at width 16: the model's forward, and all else."""
    prompt = torch.randint(100, 20_000, (1, context), generator=torch.Generator().manual_seed(1))
    generator = SpeculativeGenerator(model, FullTree(), trees.BestFirst(nodes=15))
    spent: list[float] = []
    plain_forward = model.forward

    @functools.wraps(plain_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = plain_forward(*args, **kwargs)
        spent.append(time.perf_counter() - start)
        return output

    whole, inside = [], []
    model.forward = forward
    try:
        steps = generator.rounds(prompt, max_new_tokens=2 * rounds, do_sample=False, eos_token_id=None)
        for _ in range(3):
            next(steps)
        for _ in range(rounds):
            spent.clear()
            took, round = seconds(lambda: next(steps))
            if round.tree.width == 16:
                whole.append(took)
                inside.append(sum(spent))
    finally:
        del model.forward
    return {
        "library": _median([total - part for total, part in zip(whole, inside, strict=True)]),
        "forward": _median(inside),
    }


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """Wall time of a call, and what it returned."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums saved parts; parts of one set add up."""
    result: dict[str, Any] = {"device": parts[0]["device"], "versions": parts[0]["versions"], "sets": {}}
    for part in parts:
        if "overhead" in part:
            result["overhead"] = part["overhead"]
        for name, measured in part["sets"].items():
            known = result["sets"].setdefault(name, {"totals": {}, "widths": {}})
            for kind in ("totals", "widths"):
                for method, counts in measured[kind].items():
                    row = known[kind].setdefault(method, {})
                    for key, value in counts.items():
                        row[key] = row.get(key, 0) + value
    return result


def figures(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The named figures of the report."""
    made = {}
    against = {
        "idle_drafter_speed_ratio": ("ratio", "model.generate"),
        "library_time_share.w16": ("share", "the target's forward at width 16"),
        "round_time_4096_over_256": ("ratio", "the library's own time in a round at 256 tokens of context"),
        "whole_round_4096_over_256": ("ratio", "a whole round at 256 tokens of context, attention included"),
        "library_ms.w16": ("ms", "a round at width 16, forward left out"),
        "forward_ms.w16": ("ms", "a round at width 16, forward alone"),
    }
    for name, value in raw.get("overhead", {}).items():
        made[name] = report.figure(value, *against[name])
    for name, measured in raw["sets"].items():
        speed = {method: row["tokens"] / row["seconds"] for method, row in measured["totals"].items()}
        for method, value in speed.items():
            if method != "plain":
                made[f"speedup.{method}.{name}"] = report.figure(value / speed["plain"], "ratio", "plain greedy")
            if method in DRAFTERS:
                for peer in ("transformers", "economize"):
                    if peer in speed:
                        made[f"{method}_speedup_vs_{peer}.{name}"] = report.figure(
                            value / speed[peer], "ratio", f"{peer} prompt lookup"
                        )
        for method, row in measured["totals"].items():
            if row["passes"] and method != "plain":
                made[f"tokens_per_round.{method}.{name}"] = report.figure(
                    row["new"] / row["passes"], "tokens", "1 of plain decoding"
                )
            if row["different"]:
                made[f"prompts_that_differ.{method}.{name}"] = report.figure(
                    row["different"], "prompts", "plain greedy in float32"
                )
        for method, counts in measured["widths"].items():
            if method in DRAFTERS:
                mean = sum(int(width) * count for width, count in counts.items()) / max(1, sum(counts.values()))
                made[f"mean_verify_width.{method}.{name}"] = report.figure(
                    mean, "rows", "chosen by the controller, of 16"
                )
    return made


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    main()
