"""The list of benchmarks of training steps, as docs/results.md has them."""

from __future__ import annotations

from benchmarks.evidence import training_tables as says
from benchmarks.evidence.listing import Benchmark, Table, Topic
from benchmarks.evidence.wording import predicted_peaks

PREDICTED = Topic(
    heading="Predicted and measured",
    benchmarks=(
        Benchmark(
            name="fidelity",
            module="benchmarks.fidelity",
            full="",
            quick="--models gpt2 --rounds 1",
            tables=(
                Table(
                    name="fidelity",
                    what="peaks of plans: gpt2, bert, vit, llama, resnet50, unet at 7 budgets each",
                    says=predicted_peaks,
                ),
            ),
        ),
        Benchmark(
            name="fidelity-amp-bf16",
            module="benchmarks.fidelity",
            full="--precision amp-bf16 --rounds 1",
            quick="--precision amp-bf16 --rounds 1 --models unet",
            tables=(
                Table(
                    name="fidelity-amp-bf16",
                    what="the same under bfloat16 autocast",
                    says=predicted_peaks,
                ),
            ),
        ),
        Benchmark(
            name="graph-fidelity",
            module="benchmarks.graph_fidelity",
            full="",
            quick="--models branches",
            tables=(
                Table(
                    name="graph-fidelity",
                    what="peaks and values, chains and networks that are none: gpt2, bert, vit, llama, t5, resnet50, "
                    "unet, densenet, shifted windows, two branches, 6 budgets each from the unplanned peak to the "
                    "smallest",
                    says=says.peaks_and_values,
                ),
            ),
        ),
        Benchmark(
            name="model-states",
            module="benchmarks.model_states",
            full="",
            quick="--models gpt2",
            tables=(
                Table(
                    name="model-states",
                    what="model states by formula: gpt2, bert, vit, resnet50, unet with 7 optimizers in 4 precisions",
                    says=says.model_states,
                ),
            ),
        ),
        Benchmark(
            name="overhead",
            module="benchmarks.overhead",
            full="--rounds 9",
            quick="--rounds 1",
            tables=(
                Table(name="overhead", what="a plan that keeps everything, against the plain step", says=says.overhead),
            ),
        ),
        Benchmark(
            name="host-cost",
            module="benchmarks.host_cost",
            full="",
            quick="--rounds 2",
            tables=(
                Table(
                    name="host-cost",
                    what="12 GPT blocks whose kernels take hardly any time, planned and recomputed by hand",
                    says=says.host_cost,
                ),
            ),
        ),
        Benchmark(
            name="pieces",
            module="benchmarks.pieces",
            full="",
            quick="--models gpt",
            tables=(
                Table(
                    name="pieces",
                    what="heads of 16,000 words, a long sequence and a U-Net in pieces, at three budgets each",
                    says=says.pieces,
                ),
            ),
        ),
        Benchmark(
            name="large_head",
            module="benchmarks.large_head",
            full="",
            quick="--words 4000 --width 32 --rounds 1",
            tables=(
                Table(
                    name="large-head",
                    what="a Llama of 128,000 words: in pieces, recomputing, and by hand in 16 chunks",
                    says=says.large_head,
                ),
                Table(name="head-rows", what="a head and its loss, so many rows at once", says=says.head_rows),
            ),
        ),
        Benchmark(
            name="true-peak-shares",
            module="benchmarks.true_peak",
            full="--part shares",
            quick="--part shares --tiny --models gpt2",
            tables=(
                Table(
                    name="true-peak-shares",
                    what="peaks of torch's budget of saved bytes, from all of them to none, and plans with these peaks",
                    says=says.true_peak_shares,
                ),
            ),
        ),
        Benchmark(
            name="true-peak-boundaries",
            module="benchmarks.true_peak",
            full="--part boundaries",
            quick="--part boundaries --tiny",
            tables=(
                Table(
                    name="true-peak-boundaries",
                    what="inputs of recomputed blocks in host memory, estimated for an H100: two Llamas, head whole "
                    "and in pieces",
                    says=says.true_peak_boundaries,
                ),
            ),
        ),
        Benchmark(
            name="pieces_fuzz",
            module="benchmarks.pieces_fuzz",
            full="--count 400 --seed 1",
            quick="--count 8",
            tables=(
                Table(name="pieces-fuzz", what="generated steps in pieces, eight budgets each", says=says.pieces_fuzz),
            ),
        ),
        Benchmark(
            name="planning",
            module="benchmarks.planning",
            full="",
            quick=None,
            tables=(
                Table(
                    name="planning",
                    what="the profile and the plan of GPTs of 12 and 48 blocks, one thread",
                    says=says.planning,
                ),
            ),
        ),
        Benchmark(
            name="extra-seconds",
            module="benchmarks.extra_seconds",
            full="",
            quick="--models vit --rounds 2",
            tables=(
                Table(
                    name="extra-seconds",
                    what="seconds that a plan adds to a step: ten models at 75, 60 and 45 % of their peak, one thread",
                    says=says.extra_seconds,
                ),
            ),
        ),
        Benchmark(
            name="equal-budget",
            module="benchmarks.equal_budget",
            full="--rounds 5",
            quick=None,
            tables=(
                Table(
                    name="equal-budget",
                    what="the time of plans of ten networks at five budgets each, in turns with both kinds of plans of "
                    "release 0.2",
                    says=says.equal_budget,
                ),
            ),
        ),
        Benchmark(
            name="recording",
            module="benchmarks.recording",
            full="",
            quick="--rounds 1",
            tables=(
                Table(
                    name="recording",
                    what="remembering what a second run sees, in a step of ten recomputed 2-ms blocks",
                    says=says.recording,
                ),
            ),
        ),
        Benchmark(
            name="fuzz",
            module="benchmarks.fuzz",
            full="--count 3000 --seed 15 --jobs 2",
            quick="--count 40 --seed 14",
            tables=(Table(name="fuzz", what="generated models, habits of training and budgets", says=says.fuzz),),
        ),
        Benchmark(
            name="loops",
            module="benchmarks.loops",
            full="",
            quick="--models gpt2",
            tables=(
                Table(
                    name="loops",
                    what="loops as people write them, at the smallest budget: gpt2, vit, resnet50, unet",
                    says=says.loops,
                ),
            ),
        ),
        Benchmark(
            name="trainers",
            module="benchmarks.trainers",
            full="",
            quick="--loops Trainer Lightning",
            tables=(
                Table(
                    name="trainers",
                    what="loops of Trainer, SFTTrainer, DPOTrainer, accelerate and Lightning, full and LoRA, with "
                    "accumulation and bfloat16, at two budgets each",
                    says=says.trainers,
                ),
            ),
        ),
        Benchmark(
            name="catalogue",
            module="benchmarks.catalogue",
            full="--jobs 2",
            quick="--families AlbertForMaskedLM",
            tables=(
                Table(
                    name="catalogue",
                    what="families of transformers at three budgets each",
                    says=says.catalogue,
                ),
            ),
        ),
        Benchmark(
            name="packages",
            module="benchmarks.packages",
            full="--jobs 2",
            quick="--models 'transformers gpt2'",
            tables=(
                Table(
                    name="packages",
                    what="models of timm, torchvision, diffusers, monai, PyG, e3nn and others at three budgets, beside "
                    "their own checkpointing",
                    says=says.packages,
                ),
            ),
        ),
        Benchmark(
            name="catalogue-link",
            module="benchmarks.catalogue",
            full="--no-menus --link 25 --jobs 1",
            quick="--no-menus --link 25 --families LlavaForConditionalGeneration",
            tables=(
                Table(
                    name="catalogue-link",
                    what="the same where plans may send over an artificial link of 25 GB/s",
                    says=says.catalogue,
                ),
            ),
        ),
    ),
)

HEADLINE = Topic(
    heading="Ten times the batch in the same memory",
    intro="PaddlePaddle Fleet documents for BERT-Large on a V100 with 32 GB 10 times the batch at 0.744 of the speed "
    "with recomputation, 14.3 times at 0.646 with offload. The small BERT has as many layers, an eighth of the width "
    "and half of the length; its cap is the peak of an unplanned step on 4 sequences. On a CPU offload is predicted, "
    "and recomputing costs more: torch draws dropout's random numbers on one core, and large steps leave the caches. "
    "BERT-Large itself has not been run: it needs a GPU for longer than there was (`python -m benchmarks.gpu`). "
    "`python -m benchmarks.headline` preloads tcmalloc where that is installed, for all ways of training alike.",
    benchmarks=(
        Benchmark(
            name="headline",
            module="benchmarks.headline",
            full="--scaled",
            quick="--rounds 1",
            quick_module="benchmarks.headline_resnet",
            tables=(
                Table(
                    name="headline",
                    what="a small BERT on two cores within 575 MiB: batch and speed",
                    says=says.headline,
                ),
                Table(
                    name="headline-resnet50",
                    what="ResNet-50: the 16 residual sums of Paddle's example as checkpoints by hand, and solved",
                    says=says.headline_resnet,
                ),
            ),
        ),
        Benchmark(
            name="nested",
            module="benchmarks.nested",
            full="",
            quick="",
            tables=(
                Table(
                    name="nested",
                    what="12-layer GPT, bytes beyond parameters, optimizer states and gradients",
                    says=says.nested,
                ),
            ),
        ),
    ),
)

OFFLOAD = Topic(
    heading="Offload",
    benchmarks=(
        Benchmark(
            name="offload",
            module="benchmarks.offload",
            full="--rounds 3",
            quick="--rounds 1 --models vit",
            tables=(
                Table(
                    name="offload",
                    what="offload in gpt2, vit, resnet50 over artificial links of 0.02 to 25 GB/s, 3 budgets each",
                    says=says.offload,
                ),
            ),
        ),
        Benchmark(
            name="offload-simulated",
            module="benchmarks.offload",
            full="--simulated",
            quick="--simulated",
            tables=(
                Table(
                    name="offload-simulated",
                    what="BERT-Large on a simulated V100 with a 25 GB/s link at half the unplanned peak",
                    says=says.offload_simulated,
                ),
            ),
        ),
    ),
)
