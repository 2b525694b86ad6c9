"""The list of benchmarks on several ranks, of largest batches, of advice and of changing shapes."""

from __future__ import annotations

from benchmarks.evidence import training_tables as says
from benchmarks.evidence.listing import Benchmark, Table, Topic

RANKS = Topic(
    heading="Several ranks",
    intro="Ranks are processes on two CPU cores, with gloo; each plan is over five steps of a new model, the first one "
    "included. Under `fully_shard` gloo's threads let go of reduced gradients earlier or later, without a plan as "
    "well: "
    "resnet50's peaks differ from run to run by one buffer.",
    benchmarks=(
        *(
            Benchmark(
                name=name,
                module="benchmarks.distributed",
                full=f"--engine {engine}{more}",
                quick=quick,
                tables=(Table(name=name, what=what, says=says.ranks),),
            )
            for name, engine, more, quick, what in (
                (
                    "distributed-ddp",
                    "ddp",
                    "",
                    "--engine ddp --models gpt2 --budgets 2",
                    "DistributedDataParallel on 2 ranks: gpt2 (also with `gradient_as_bucket_view`, `static_graph`, "
                    "`no_sync`), bert, llama, resnet50 at 6 budgets each",
                ),
                (
                    "distributed-ddp-4",
                    "ddp",
                    " --ranks 4 --models gpt2 resnet50 --budgets 3",
                    None,
                    "the same on 4 ranks: gpt2, resnet50 at 3 budgets each",
                ),
                (
                    "distributed-fsdp2",
                    "fsdp2",
                    "",
                    "--engine fsdp2 --models gpt2 --budgets 2",
                    '`fully_shard` on 2 ranks: gpt2 (also with `reshard_after_forward=False` and `reshard="solve"`), '
                    "bert, llama, resnet50 at 6 budgets each",
                ),
                (
                    "distributed-fsdp2-4",
                    "fsdp2",
                    " --ranks 4 --models gpt2 resnet50 'resnet50 of batch 64' --budgets 3",
                    None,
                    "the same on 4 ranks: gpt2, resnet50 at 3 budgets each",
                ),
            )
        ),
        Benchmark(
            name="distributed-overhead",
            module="benchmarks.distributed_overhead",
            full="--rounds 31",
            quick="--rounds 1",
            tables=(
                Table(
                    name="distributed-overhead",
                    what="a plan that keeps everything, on 2 ranks, in turns with plain steps: gpt2, llama, resnet50",
                    says=says.rank_overhead,
                ),
            ),
        ),
    ),
)

LARGEST_BATCH = Topic(
    heading="The largest batch",
    benchmarks=(
        Benchmark(
            name="max-batch",
            module="benchmarks.max_batch",
            full="",
            quick="--models bert",
            tables=(
                Table(
                    name="max-batch",
                    what="largest batches of small gpt2, bert, resnet50 and unet without a plan, with recompute and "
                    "with "
                    "offload, against those found by trying",
                    says=says.max_batch,
                ),
            ),
        ),
    ),
)

ADVICE = Topic(
    heading="Advice",
    benchmarks=(
        Benchmark(
            name="advise",
            module="benchmarks.advise",
            full="--no-menus",
            quick="--no-menus --models gpt2",
            tables=(
                Table(
                    name="advise",
                    what="what `advise` predicts for gpt2 and resnet50 at two budgets each, built for real, first "
                    "steps "
                    "included",
                    says=says.advice,
                ),
            ),
        ),
        Benchmark(
            name="simulated-ranks",
            module="benchmarks.simulated_ranks",
            full="",
            quick="--ranks 2 --models mlp",
            tables=(
                Table(
                    name="simulated-ranks",
                    what="one simulated rank, without and with a plan, against the worst of 2 and 4 gloo ranks: gpt2, "
                    "llama, resnet50 and an mlp with uneven rows",
                    says=says.simulated_ranks,
                ),
            ),
        ),
    ),
)

ESTIMATES = Topic(
    heading="Devices that are not there",
    intro="Estimates run on fake tensors, without the device and without memory for the model "
    "([Will it fit?](estimate.md)).",
    benchmarks=(
        Benchmark(
            name="estimates-cards",
            module="benchmarks.estimates",
            full="--part cards --jobs 2",
            quick="--part cards --models vit",
            tables=(
                Table(
                    name="estimates-cards",
                    what="unplanned peaks that an H200 had in earlier tables, estimated on a CPU: gpt2 and unet in two "
                    "sizes, resnet50, vit and 95 tiny models of transformers",
                    says=says.estimates,
                ),
            ),
        ),
        Benchmark(
            name="estimates-seconds",
            module="benchmarks.estimates",
            full="--part seconds",
            quick=None,
            tables=(
                Table(
                    name="estimates-seconds",
                    what="steps of ten models and of three plans for each, from a file that was calibrated before; "
                    "plans from the estimate beside plans from a measured profile",
                    says=says.estimated_seconds,
                ),
            ),
        ),
        Benchmark(
            name="estimates-peaks",
            module="benchmarks.estimates",
            full="--part peaks --jobs 2",
            quick="--part peaks --models bert",
            tables=(
                Table(
                    name="estimates-peaks",
                    what="steps on the CPU, unplanned and under two plans that were solved from the estimate: the "
                    "models of the zoo and tiny models of transformers",
                    says=says.estimates,
                ),
            ),
        ),
    ),
)

SHAPES = Topic(
    heading="Changing shapes",
    benchmarks=(
        Benchmark(
            name="dynamic",
            module="benchmarks.dynamic",
            full="",
            quick="--steps 8",
            tables=(
                Table(
                    name="dynamic",
                    what="a GPT-2 on batches of eight lengths, three of them profiled, in 60 % of the longest one's "
                    "peak",
                    says=says.dynamic,
                ),
            ),
        ),
    ),
)
