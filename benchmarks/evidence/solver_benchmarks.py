"""The list of benchmarks of solvers, and of torch's own ways beside plans."""

from __future__ import annotations

from benchmarks.evidence import solver_tables as says
from benchmarks.evidence.listing import Benchmark, Table, Topic

PEERS = Topic(
    heading="Beside torch's own ways",
    intro="One page has every row, what each way can do, and what is missing: [Peers](peers.md).",
    benchmarks=(
        Benchmark(
            name="peers",
            module="benchmarks.peers",
            full="--models gpt2 mindspore_blocks --rounds 4",
            quick="--models gpt2 --rounds 1 --solvers dp --budgets 0.5",
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
