"""The list of benchmarks of solvers, of plans of single ops, and of torch's own ways beside them."""

from __future__ import annotations

from benchmarks.evidence import solver_tables as says
from benchmarks.evidence.listing import Benchmark, Table, Topic
from benchmarks.evidence.training_tables import graph_fuzz

GRAPHS = Topic(
    heading="Plans of single ops",
    benchmarks=(
        Benchmark(
            name="graph-fidelity",
            module="benchmarks.graph_fidelity",
            full="--seconds 4",
            quick="--seconds 1 --models branches",
            minutes=20,
            tables=(
                Table(
                    name="graph-fidelity",
                    what="peaks: gpt2, bert, vit, llama, t5, resnet50, unet, densenet, shifted windows, two branches, "
                    "6 "
                    "budgets each from the unplanned peak to the smallest",
                    says=says.graph_peaks,
                ),
            ),
        ),
        Benchmark(
            name="graph-fidelity-inductor",
            module="benchmarks.graph_fidelity",
            full="--backend inductor --seconds 4 --models densenet",
            quick=None,  # compiles for minutes
            minutes=20,
            tables=(
                Table(
                    name="graph-fidelity-inductor",
                    what="the same compiled by Inductor, after as many solves as it takes: densenet",
                    says=says.graph_peaks,
                ),
            ),
        ),
        Benchmark(
            name="graph-fuzz",
            module="benchmarks.graph_fuzz",
            full="--count 1000 --seed 15 --jobs 2",
            quick="--count 4 --seed 15",
            minutes=25,
            tables=(Table(name="graph-fuzz", what="generated programs, planned op by op", says=graph_fuzz),),
        ),
        Benchmark(
            name="graph-stages",
            module="benchmarks.graph_stages",
            full="--seconds 10",
            quick="--seconds 1 --rounds 1 --models branches",
            minutes=30,
            tables=(
                Table(
                    name="graph-stages",
                    what="against plans of stages at 5 budgets each: densenet, unet, windows, branches, gpt2, bert",
                    says=says.graph_stages,
                ),
            ),
        ),
        Benchmark(
            name="graph-planning",
            module="benchmarks.graph_planning",
            full="--seconds 10",
            quick="--seconds 1 --models windows",
            minutes=20,
            tables=(
                Table(
                    name="graph-planning",
                    what="from a model to a plan: profile, then 10 s of search per budget",
                    says=says.graph_planning,
                ),
            ),
        ),
        Benchmark(
            name="graph-planning-60s",
            module="benchmarks.graph_planning",
            full="--models resnet50 swin convnext whisper t5",
            quick=None,  # as graph-planning, for longer
            minutes=25,
            tables=(
                Table(
                    name="graph-planning-60s",
                    written_as="graph-planning",
                    what="the same, up to a minute of search per budget: transformers' Swin, ConvNeXt and Whisper, "
                    "resnet50, t5",
                    says=says.graph_planning,
                ),
            ),
        ),
    ),
)

PEERS = Topic(
    heading="Beside torch's own ways",
    intro="One page has every row, what each way can do, and what is missing: [Peers](peers.md).",
    benchmarks=(
        Benchmark(
            name="peers",
            module="benchmarks.peers",
            full="--models gpt2 mindspore_blocks --rounds 4",
            quick="--models gpt2 --rounds 1 --solvers dp --budgets 0.5",
            minutes=25,
            tables=(
                Table(
                    name="peers",
                    what="eager plans at the measured peak of checkpointing, of saving matrix products and attention, "
                    "and "
                    "of `activation_memory_budget` with four solvers under aot_eager: gpt2, mindspore_blocks",
                    says=says.torch_ways,
                ),
            ),
        ),
        Benchmark(
            name="peers-models",
            module="benchmarks.peers",
            full="--models gpt2 bert llama resnet50 unet --solvers dp --budgets 0.1 0.5 0.9 --rounds 5",
            quick=None,  # as peers
            minutes=20,
            tables=(
                Table(
                    name="peers-models",
                    written_as="peers",
                    what="the same with transformers' gradient checkpointing, torch_remat, and torch's default solver "
                    "at three settings: gpt2, bert, llama, resnet50, unet",
                    says=says.torch_ways,
                ),
            ),
        ),
        Benchmark(
            name="graph-partitions",
            module="benchmarks.graph_partitions",
            full="--models gpt2 bert unet --rounds 9 --seconds 5",
            quick="--models gpt2 --rounds 1 --seconds 1 --solvers dp --budgets 0.5",
            minutes=40,
            tables=(
                Table(
                    name="graph-partitions",
                    what="plans of single ops against `activation_memory_budget` with five solvers at three settings, "
                    "at "
                    "equal measured peak, the ops run as they are on both sides: gpt2, bert, unet",
                    says=says.partitions,
                ),
            ),
        ),
        Benchmark(
            name="graph-partitions-more",
            module="benchmarks.graph_partitions",
            full="--models llama resnet50 --rounds 9 --seconds 5",
            quick=None,  # as graph-partitions
            minutes=30,
            tables=(
                Table(
                    name="graph-partitions-more",
                    written_as="graph-partitions",
                    what="the same: llama, resnet50",
                    says=says.partitions,
                ),
            ),
        ),
        Benchmark(
            name="graph-partitions-inductor",
            module="benchmarks.graph_partitions",
            full="--backend inductor --models gpt2 --solvers dp greedy --budgets 0.1 0.5 --rounds 9 --seconds 5",
            quick=None,  # compiles for minutes
            minutes=30,
            tables=(
                Table(
                    name="graph-partitions-inductor",
                    what="the same compiled by Inductor on both sides: gpt2, two solvers at two settings, torch's "
                    "default",
                    says=says.partitions,
                ),
            ),
        ),
    ),
)

SOLVERS = Topic(
    heading="Solvers",
    benchmarks=(
        Benchmark(
            name="chain-solvers",
            module="benchmarks.chain_solvers",
            full="",
            quick="--quick",
            minutes=10,
            tables=(
                Table(
                    name="chain-solvers",
                    what="`rotor`'s whole frontier on one core, the slowest of its options",
                    says=says.rotor_frontier,
                ),
                Table(
                    name="chain-solvers-certificate",
                    what="how far `rotor`'s points can be from the persistent optimum, proven",
                    says=says.certificate,
                ),
                Table(
                    name="chain-solvers-uniform",
                    what="forward runs of uniform chains against Griewank and Walther's closed form",
                    says=says.uniform,
                ),
                Table(name="chain-solvers-long", what="`auto` on chains of 1,000 stages", says=says.long_chains),
                Table(
                    name="chain-solvers-ilp",
                    what="`ilp`, proof of the optimum for 12 stages",
                    says=says.chain_proofs,
                ),
            ),
        ),
        Benchmark(
            name="solvers",
            module="benchmarks.solvers",
            full="--solvers auto --budgets 30% 50% 70%",
            quick="--quick",
            minutes=25,
            tables=(
                Table(
                    name="solvers",
                    what="`auto` on training graphs of 99 to 2,610 ops, budgets of 30 to 70 % of the range",
                    says=says.graph_solvers,
                ),
                Table(name="solvers-verdicts", what="numbers that were to be reached there", says=says.verdicts),
            ),
        ),
        Benchmark(
            name="solvers-methods",
            module="benchmarks.solvers",
            full="--problems vgg16 unet random-100 random-150 --budgets 50% --time-limit 8",
            quick=None,  # as solvers
            minutes=10,
            tables=(
                Table(
                    name="methods/solvers",
                    written_as="solvers",
                    what="every graph method on four small graphs, 8 s each",
                    says=says.methods,
                ),
            ),
        ),
        Benchmark(
            name="graph-oracle",
            module="benchmarks.graph_oracle",
            full="--seeds 1000",
            quick="--seeds 5",
            minutes=15,
            tables=(
                Table(
                    name="graph-oracle",
                    what="all graph methods against the exhaustive search on 1,000 random graphs",
                    says=says.oracle,
                ),
            ),
        ),
    ),
)
