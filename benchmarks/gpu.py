"""Everything on a CUDA device, in parts that each end within nine minutes, need no network, and are not done twice.

Parts come in the order of what is least known, and ``--minutes 25`` ends after so long. Each writes tables of its own
into the folder of results, most of them row by row: what was measured when the time was over is there, and says that it
is not all. The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.evidence.listing import Benchmark, Table
from benchmarks.evidence.running import run_all
from benchmarks.fidelity import MODELS
from benchmarks.loops import MODELS as LOOP_MODELS
from benchmarks.rehearsal import rehearse

ROOT = Path(__file__).parent.parent
PART_SECONDS = 540.0
GRAPH_MODELS = ("gpt2", "bert", "llama", "unet")
PEER_MODELS = ("gpt2", "bert", "llama", "resnet50", "unet")
COMPILED_MODELS = ("gpt2", "bert", "llama")
TINY_SOLVERS = "--solvers dp --budgets 0.5 --rounds 1"


def parts() -> Iterator[Benchmark]:
    """All parts, what is least known first; the quick form of each is tiny, on the CPU."""
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        name = f"tests-{path.stem.removeprefix('test_')}"
        arguments = f"{path.relative_to(ROOT).as_posix()} --name {name}"
        yield _part(name, "benchmarks.gpu_tests", arguments, arguments, name)
    for model in PEER_MODELS:
        full = f"--models {model} --device cuda --precision bf16 --solvers dp --budgets 0.1 0.5 0.9"
        yield _part(f"peers-{model}", "benchmarks.peers", full, f"--models {model} {TINY_SOLVERS}", "peers-cuda")
    for model in COMPILED_MODELS:
        full = f"--models {model} --device cuda --precision bf16 --inductor --budgets 0.1 0.5"
        tiny = f"--models {model} {TINY_SOLVERS}"
        yield _part(f"peers-inductor-{model}", "benchmarks.peers", full, tiny, "peers-inductor-cuda")
    yield _part("host-cost", "benchmarks.host_cost", "--device cuda", "--rounds 2", "host-cost-cuda")
    full, tiny = "--device cuda --width 2048", "--words 500 --width 16 --rounds 1"
    yield _part("large-head", "benchmarks.large_head", full, tiny, "large-head-cuda")
    for memory, batch in (("80GB", 8), ("140GB", 16)):
        full = f"--memory {memory} --batch {batch}"
        tiny = "--memory 250kB --batch 2 --device cpu --tiny"
        yield _part(f"llama-7b-{memory}", "benchmarks.gpu_llama", full, tiny, f"llama-7b-{memory}-cuda")
    for model in ("gpt2", "resnet50"):
        name, full = f"offload-overlap-{model}", f"--models {model}"
        tiny = f"{full} --device cpu --tiny --rounds 1"
        yield _part(name, "benchmarks.gpu_offload", full, tiny, "offload-overlap-cuda")
    for attention in ("eager", "sdpa"):
        tiny = f"--attention {attention} --device cpu --tiny --memory 3MB"
        full = f"--attention {attention} --memory 32GB"
        yield _part(f"bert-large-{attention}", "benchmarks.gpu_bert", full, tiny, f"bert-large-{attention}-cuda")
    full, tiny = "--part seconds --device cuda", "--part seconds --models mlp"
    yield _part("estimates-seconds", "benchmarks.estimates", full, tiny, "estimates-seconds-cuda")
    for model in MODELS:
        full = f"--models {model} --device cuda"
        yield _part(f"fidelity-{model}", "benchmarks.fidelity", full, f"--models {model} --rounds 1", "fidelity-cuda")
    for model in LOOP_MODELS:
        full = f"--models {model} --device cuda"
        yield _part(f"loops-{model}", "benchmarks.loops", full, f"--models {model}", "loops-cuda")
    catalogue = "--no-menus --device cuda --jobs 8"
    yield _part("catalogue", "benchmarks.catalogue", catalogue, "--families BertForMaskedLM", "catalogue-cuda")
    yield _part("overhead", "benchmarks.overhead", "--device cuda", "--rounds 1", "overhead-cuda")
    yield _part("nested", "benchmarks.nested", "--device cuda", "", "nested-cuda")
    for backend in ("eager", "inductor"):
        table = "graph-fidelity-cuda" if backend == "eager" else "graph-fidelity-inductor-cuda"
        for model in GRAPH_MODELS:
            full = f"--models {model} --backend {backend} --device cuda"
            tiny = f"--models branches --backend {backend}"
            yield _part(f"graph-{backend}-{model}", "benchmarks.graph_fidelity", full, tiny, table)


def _part(name: str, module: str, full: str, tiny: str, table: str) -> Benchmark:
    """A part whose table is kept under the part's name."""
    kept = Table(name=f"{name}-cuda" if not name.startswith("tests-") else name, written_as=table, what=name, says=str)
    return Benchmark(name=name, module=module, full=full, quick=tiny, tables=(kept,))


def one_of_each(chosen: Iterable[Benchmark]) -> list[Benchmark]:
    """One part of those that are alike: of the same benchmark, compiled by Inductor or not."""
    first: dict[tuple[str, bool], Benchmark] = {}
    for part in chosen:
        first.setdefault((part.module, "inductor" in part.name), part)
    return list(first.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts on the CUDA device; without one say so and succeed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    known = {part.name: part for part in parts()}
    parser.add_argument("--out", type=Path, default=ROOT / "results-gpu", help="folder of tables and logs")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="these, by their names or how the names begin")
    parser.add_argument("--list", action="store_true", help="the parts and their commands")
    parser.add_argument("--minutes", type=float, help="end after so long; the same command goes on from there")
    parser.add_argument("--rehearse", action="store_true", help="one part of each kind, tiny, on the CPU")
    options = parser.parse_args(arguments)
    chosen = [part for name, part in known.items() if not options.parts or name.startswith(tuple(options.parts))]
    if not chosen:
        parser.error(f"--parts: expected names of --list, got {' '.join(options.parts)}")
    if options.list:
        for part in chosen:
            print(f"{part.name}: {part.command}")
        return 0
    if options.rehearse:
        failed = rehearse(chosen if options.parts else one_of_each(chosen), options.out.resolve())
        print(f"failed: {', '.join(failed)}" if failed else "all parts work")
        return 1 if failed else 0
    if not torch.cuda.is_available():
        print("benchmarks.gpu: no CUDA device here; nothing was run (--rehearse tries the parts on the CPU)")
        return 0
    all_seconds = None if options.minutes is None else 60 * options.minutes
    out = options.out.resolve()
    try:
        failed = run_all(
            chosen,
            "full",
            work=out / "work",
            results=out,
            limit_seconds=PART_SECONDS,
            all_seconds=all_seconds,
            partial=True,
        )
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    if failed:
        print(f"failed, or no time was left: {', '.join(failed)}; the same command tries these again")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
