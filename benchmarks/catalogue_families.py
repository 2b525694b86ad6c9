"""Model families of transformers, each as its tiniest training step: the class, its sizes and a batch that fits.

Only sizes are set (widths, depths, counts, vocabularies, images, and token numbers inside them). Every switch keeps
its default: dropout, layer drop, caches, attention implementation, what is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from planner.zoo.training import transformers
from profiler.workload.tensor_trees import tensors_in

BATCH, TOKENS, VOCABULARY, IMAGE = 2, 16, 64, 32
# By the name of an attribute, where a configuration has it as a whole number.
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff"), 64),
    **dict.fromkeys(("hidden_dim", "d_inner"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "max_source_positions"), 64),
    **dict.fromkeys(("d_kv", "d_head", "head_dim", "state_size", "ssm_state_size", "mamba_head_dim", "patch_size"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "bos_token_id", "decoder_start_token_id"), 1),
    "vocab_size": VOCABULARY,
    "image_size": IMAGE,
    "moe_intermediate_size": 32,
    "mamba_num_heads": 8,
    "num_mel_bins": 16,
    "time_step_rank": 4,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
LossOf = Callable[[Any], Tensor]
Batch = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """A model class and what it is trained on.

    Attributes:
        model: the class's name in transformers.
        batch: makes the keyword arguments of its forward.
        sizes: of its configuration, beside ``SIZES``.
        loss: of its output; None where the output has its own.
    """

    model: str
    batch: Callable[[], Batch]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    loss: LossOf | None = None

    def build(self) -> tuple[nn.Module, Batch]:
        """The model in training mode, with random weights, and its batch, by the random numbers that torch is at."""
        kind = getattr(transformers(), self.model)
        model = kind(shrunk(kind.config_class, self.sizes))
        return model.train(), self.batch()


def shrunk(kind: Any, sizes: Mapping[str, Any]) -> Any:
    """A configuration with tiny sizes and nothing else changed."""
    default = kind()
    alias = {name for name in SIZES if isinstance(getattr(kind, name, None), property)} | set(kind.attribute_map)
    common = {n: size for n, size in SIZES.items() if n not in alias and type(getattr(default, n, None)) is int}
    return kind(**{**common, **sizes})


def _tokens(count: int = TOKENS, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(3, vocabulary, (BATCH, count))


def _text() -> Batch:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens.clone()}


def _image(width: int = IMAGE) -> Tensor:
    return torch.randn(BATCH, 3, width, width)


def _classes() -> Tensor:
    return torch.arange(BATCH) % 2


def _classified(**inputs: Callable[[], Tensor]) -> Callable[[], Batch]:
    """Makes a batch of these inputs, with a class for each."""
    return lambda: {**{name: make() for name, make in inputs.items()}, "labels": _classes()}


def _images(width: int = IMAGE) -> Callable[[], Batch]:
    return _classified(pixel_values=lambda: _image(width))


def _masked_images() -> Batch:
    return {"pixel_values": _image(), "bool_masked_pos": torch.rand(BATCH, (IMAGE // 8) ** 2) > 0.5}


def _film() -> Tensor:
    return torch.randn(BATCH, 4, 3, IMAGE, IMAGE)


def _spoken(**inputs: tuple[int, ...]) -> Callable[[], Batch]:
    """Makes a batch of sound of these shapes, with the text that was said."""
    return lambda: {**{name: torch.randn(BATCH, *shape) for name, shape in inputs.items()}, "labels": _tokens()}


def _pairs() -> Batch:
    return {"input_ids": _tokens(), "pixel_values": _image(), "return_loss": True}


def _captioned() -> Batch:
    return {"pixel_values": _image(), **_text()}


def _pictures_in_text() -> Batch:
    """The last word of the vocabulary stands for a patch of the image."""
    patches = torch.full((BATCH, (IMAGE // 8) ** 2), VOCABULARY - 1)
    tokens = torch.cat([patches, _tokens(8, VOCABULARY - 1)], 1)
    return {"pixel_values": _image(), "input_ids": tokens, "labels": tokens.clone()}


def _series() -> Batch:
    return {
        "past_values": torch.randn(BATCH, 10),
        "past_time_features": torch.randn(BATCH, 10, 0),
        "past_observed_mask": torch.ones(BATCH, 10),
        "future_values": torch.randn(BATCH, 4),
        "future_time_features": torch.randn(BATCH, 4, 0),
    }


def _patched_series() -> Batch:
    return {"past_values": torch.randn(BATCH, 16, 2), "future_values": torch.randn(BATCH, 4, 2)}


def _games() -> Batch:
    shapes = {"states": 5, "actions": 3, "rewards": 1, "returns_to_go": 1}
    moves = {name: torch.randn(BATCH, 6, width) for name, width in shapes.items()}
    return {**moves, "timesteps": torch.arange(6).expand(BATCH, 6), "attention_mask": torch.ones(BATCH, 6)}


def _first_output(output: Any) -> Tensor:
    """Of an output without a loss: the mean square of its first tensor that takes a gradient."""
    return next(tensor for tensor in tensors_in(output) if tensor.requires_grad).float().square().mean()


_DECODERS = """
    GPT2LMHeadModel AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM AriaTextForCausalLM BertGenerationDecoder
    BioGptForCausalLM BitNetForCausalLM BloomForCausalLM CohereForCausalLM Cohere2ForCausalLM CTRLLMHeadModel
    DeepseekV4ForCausalLM DiffLlamaForCausalLM DogeForCausalLM Emu3ForCausalLM Ernie4_5ForCausalLM
    Ernie4_5_MoeForCausalLM Exaone4ForCausalLM FalconMambaForCausalLM FlexOlmoForCausalLM GemmaForCausalLM
    Gemma2ForCausalLM Gemma3ForCausalLM GlmForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM GPTBigCodeForCausalLM
    GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM
    GraniteMoeSharedForCausalLM HeliumForCausalLM JetMoeForCausalLM LlamaForCausalLM Lfm2ForCausalLM
    Llama4ForCausalLM MambaForCausalLM MiniMaxForCausalLM MiniMaxM2ForCausalLM MistralForCausalLM MixtralForCausalLM
    ModernBertDecoderForCausalLM MptForCausalLM NanoChatForCausalLM NemotronHForCausalLM OlmoForCausalLM
    Olmo2ForCausalLM OlmoHybridForCausalLM OlmoeForCausalLM OpenAIGPTLMHeadModel OPTForCausalLM PersimmonForCausalLM
    PhiForCausalLM Phi3ForCausalLM PhimoeForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM
    Qwen3MoeForCausalLM RecurrentGemmaForCausalLM RwkvForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
    StableLmForCausalLM Starcoder2ForCausalLM XGLMForCausalLM XLMWithLMHeadModel
"""
_ENCODERS = """
    AlbertForMaskedLM BertForMaskedLM ConvBertForMaskedLM Data2VecTextForMaskedLM
    DebertaForMaskedLM DebertaV2ForMaskedLM DistilBertForMaskedLM ElectraForMaskedLM EuroBertForMaskedLM
    FlaubertWithLMHeadModel FNetForMaskedLM IBertForMaskedLM LayoutLMForMaskedLM LongformerForMaskedLM
    LukeForMaskedLM MegatronBertForMaskedLM MobileBertForMaskedLM ModernBertForMaskedLM MPNetForMaskedLM
    MraForMaskedLM NomicBertForMaskedLM NystromformerForMaskedLM RemBertForMaskedLM RobertaForMaskedLM
    RobertaPreLayerNormForMaskedLM RoCBertForMaskedLM RoFormerForMaskedLM SqueezeBertForMaskedLM TapasForMaskedLM
    XLMRobertaForMaskedLM
"""
_ENCODER_DECODERS = """
    BartForConditionalGeneration BigBirdPegasusForConditionalGeneration BlenderbotForConditionalGeneration
    BlenderbotSmallForConditionalGeneration FSMTForConditionalGeneration LEDForConditionalGeneration
    M2M100ForConditionalGeneration MarianMTModel MBartForConditionalGeneration MvpForConditionalGeneration
    NllbMoeForConditionalGeneration PegasusForConditionalGeneration PegasusXForConditionalGeneration
    PLBartForConditionalGeneration ProphetNetForConditionalGeneration
"""

_LATENT = {"qk_rope_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4}
_PYRAMID = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
_HEADED_PYRAMID = {**_PYRAMID, "num_attention_heads": [1, 2, 3, 4], "decoder_hidden_size": 16}
_WINDOWS = {"embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4, "patch_size": 4}
_WAVES = {
    "conv_dim": (16, 16),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 4,
    "mask_feature_length": 4,
    "classifier_proj_size": 16,
}
_PART = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT_PART = {**_PART, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
_TEXT_PART |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_VISION_PART = {**_PART, "image_size": IMAGE, "patch_size": 8}
_TWO_PARTS = {"text_config": _TEXT_PART, "vision_config": _VISION_PART, "projection_dim": 16}
_FORECAST = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]}
_FORECAST |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32)
_PATCHES = {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4}
_SHORT_FILM = {"num_frames": 4}
_STARTED = {"decoder_start_token_id": 0}

_TEXT_WITH_SIZES: Mapping[str, Mapping[str, Any]] = {
    "BambaForCausalLM": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "BigBirdForMaskedLM": {"block_size": 2, "num_random_blocks": 1},
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "DeepseekV2ForCausalLM": {**_LATENT, "first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "DeepseekV3ForCausalLM": {**_LATENT, "first_k_dense_replace": 1, "head_dim": 8},
    "FalconForCausalLM": {},
    "FunnelForMaskedLM": {"block_sizes": [1, 1, 1]},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "JambaForCausalLM": {"num_hidden_layers": 8, "mamba_d_state": 8},
    "LongcatFlashForCausalLM": _LATENT,
    "LongT5ForConditionalGeneration": _STARTED,
    "Mamba2ForCausalLM": {"num_heads": 8, "n_groups": 1, "head_dim": 8, "chunk_size": 8},
    "MiniCPM3ForCausalLM": _LATENT,
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "Qwen3NextForCausalLM": {"num_hidden_layers": 4},
    "MT5ForConditionalGeneration": _STARTED,
    "SwitchTransformersForConditionalGeneration": _STARTED,
    "T5ForConditionalGeneration": _STARTED,
    "UMT5ForConditionalGeneration": _STARTED,
    "XLNetLMHeadModel": {},
}
_VISION: Mapping[str, Mapping[str, Any]] = {
    "BeitForImageClassification": {},
    "BitForImageClassification": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "num_groups": 4},
    "ConvNextForImageClassification": {**_PYRAMID, "patch_size": 4},
    "ConvNextV2ForImageClassification": {**_PYRAMID, "patch_size": 4},
    "Data2VecVisionForImageClassification": {},
    "DeiTForImageClassification": {},
    "Dinov2ForImageClassification": {},
    "DonutSwinForImageClassification": _WINDOWS,
    "FocalNetForImageClassification": {"embed_dim": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    | {"focal_levels": [1, 1], "focal_windows": [3, 3]},
    "IJepaForImageClassification": {},
    "MobileNetV1ForImageClassification": {"depth_multiplier": 0.125, "min_depth": 4},
    "MobileNetV2ForImageClassification": {"depth_multiplier": 0.125, "min_depth": 4},
    "MobileViTForImageClassification": {"patch_size": 2, "hidden_sizes": [16, 24, 32], "mlp_ratio": 1.0}
    | {"neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "expand_ratio": 2.0},
    "PoolFormerForImageClassification": {**_PYRAMID, "patch_size": 7},
    "PvtForImageClassification": _HEADED_PYRAMID,
    "PvtV2ForImageClassification": _HEADED_PYRAMID,
    "RegNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "groups_width": 4},
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]},
    "SegformerForImageClassification": _HEADED_PYRAMID,
    "SiglipForImageClassification": {"vision_config": _VISION_PART},
    "SwiftFormerForImageClassification": {"depths": [1, 1, 1, 1], "embed_dims": [8, 16, 16, 32]},
    "SwinForImageClassification": _WINDOWS,
    "Swinv2ForImageClassification": _WINDOWS,
    "ViTForImageClassification": {},
    "ViTMSNForImageClassification": {},
}
_SOUND = """
    Data2VecAudioForSequenceClassification HubertForSequenceClassification SEWForSequenceClassification
    SEWDForSequenceClassification UniSpeechForSequenceClassification UniSpeechSatForSequenceClassification
    Wav2Vec2ForSequenceClassification Wav2Vec2ConformerForSequenceClassification WavLMForSequenceClassification
"""
_OTHERS = (
    Family(
        "ASTForAudioClassification",
        _classified(input_values=lambda: torch.randn(BATCH, 32, 16)),
        {"max_length": 32, "frequency_stride": 8, "time_stride": 8},
    ),
    Family("AltCLIPModel", _pairs, {**_TWO_PARTS, "text_config": {**_TEXT_PART, "project_dim": 16}}),
    Family("AutoformerForPrediction", _series, {**_FORECAST, "label_length": 4, "moving_average": 3}),
    Family(
        "BlipForConditionalGeneration",
        _captioned,
        {**_TWO_PARTS, "text_config": {**_TEXT_PART, "encoder_hidden_size": 32, "sep_token_id": 2}},
    ),
    Family(
        "CanineForSequenceClassification",
        _classified(input_ids=lambda: _tokens(32)),
        {"downsampling_rate": 4, "num_hash_buckets": 64, "local_transformer_stride": 16},
    ),
    Family("ChineseCLIPModel", _pairs, _TWO_PARTS),
    Family("CLIPModel", _pairs, _TWO_PARTS),
    Family("CLIPSegModel", _pairs, _TWO_PARTS),
    Family("DecisionTransformerModel", _games, {"state_dim": 5, "act_dim": 3, "max_ep_len": 16}, _first_output),
    Family("GitForCausalLM", _captioned, {"vision_config": _VISION_PART}),
    Family("GLPNForDepthEstimation", lambda: {"pixel_values": _image()}, _HEADED_PYRAMID, _first_output),
    Family(
        "ImageGPTForImageClassification",
        _classified(input_ids=_tokens),
        {"vocab_size": VOCABULARY + 1, "n_positions": 32},
    ),
    Family("InformerForPrediction", _series, _FORECAST),
    Family(
        "LevitForImageClassification",
        _images(64),
        {"image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [1, 2, 3], "depths": [1, 1, 1]}
        | {"key_dim": [8, 8, 8], "patch_size": 16},
    ),
    Family(
        "LlavaForConditionalGeneration",
        _pictures_in_text,
        {
            "text_config": {**_TEXT_PART, "model_type": "llama", "num_key_value_heads": 2},
            "vision_config": {**_VISION_PART, "model_type": "clip_vision_model"},
            "image_token_id": VOCABULARY - 1,
            "image_seq_length": 16,
        },
    ),
    Family(
        "LxmertModel",
        lambda: {
            "input_ids": _tokens(),
            "visual_feats": torch.randn(BATCH, 4, 16),
            "visual_pos": torch.rand(BATCH, 4, 4),
        },
        {"l_layers": 2, "x_layers": 2, "r_layers": 1, "visual_feat_dim": 16},
        _first_output,
    ),
    Family(
        "MobileViTV2ForImageClassification",
        _images(64),
        {"image_size": 64, "patch_size": 2, "width_multiplier": 0.1, "n_attn_blocks": [1, 1, 1]}
        | {"base_attn_unit_dims": [32, 48, 64]},
    ),
    Family(
        "MoonshineForConditionalGeneration",
        _spoken(input_values=(2000,)),
        {f"{side}_num_{what}": 4 for side in ("encoder", "decoder") for what in ("attention_heads", "key_value_heads")}
        | {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "pad_token_id": 0},
    ),
    Family("PatchTSMixerForPrediction", _patched_series, _PATCHES),
    Family("PatchTSTForPrediction", _patched_series, {**_PATCHES, "ffn_dim": 32}),
    Family(
        "PerceiverForMaskedLM",
        lambda: {"inputs": _tokens(), "labels": _tokens()},
        {"num_latents": 8, "d_latents": 32, "num_blocks": 1, "num_self_attends_per_block": 2, "qk_channels": 32}
        | {"num_self_attention_heads": 2, "num_cross_attention_heads": 2, "v_channels": 32}
        | {"max_position_embeddings": TOKENS},
    ),
    Family(
        "SegformerForSemanticSegmentation",
        lambda: {"pixel_values": _image(), "labels": torch.randint(0, 2, (BATCH, IMAGE, IMAGE))},
        _HEADED_PYRAMID,
    ),
    Family(
        "SiglipModel", _pairs, {"text_config": {**_TEXT_PART, "projection_size": 32}, "vision_config": _VISION_PART}
    ),
    Family(
        "Speech2TextForConditionalGeneration",
        _spoken(input_features=(32, 16)),
        {"input_feat_per_channel": 16, "conv_channels": 32},
    ),
    Family("TimeSeriesTransformerForPrediction", _series, _FORECAST),
    Family("TimesformerForVideoClassification", _classified(pixel_values=_film), _SHORT_FILM),
    Family("VideoMAEForVideoClassification", _classified(pixel_values=_film), _SHORT_FILM),
    Family("ViTForMaskedImageModeling", _masked_images, {"encoder_stride": 8}),
    Family(
        "ViTMAEForPreTraining",
        lambda: {"pixel_values": _image()},
        {"decoder_hidden_size": 16, "decoder_intermediate_size": 32, "decoder_num_attention_heads": 2}
        | {"decoder_num_hidden_layers": 2},
    ),
    Family(
        "ViltForQuestionAnswering",
        lambda: {"input_ids": _tokens(), "pixel_values": _image(), "labels": torch.rand(BATCH, 2)},
    ),
    Family("VivitForVideoClassification", _classified(pixel_values=_film), {**_SHORT_FILM, "tubelet_size": [2, 8, 8]}),
    Family(
        "Wav2Vec2BertForSequenceClassification",
        _classified(input_features=lambda: torch.randn(BATCH, 24, 16)),
        {"feature_projection_input_dim": 16, "mask_time_length": 4, "conv_depthwise_kernel_size": 7},
    ),
    Family("WhisperForConditionalGeneration", _spoken(input_features=(16, 64)), {"max_source_positions": 32}),
)

_ALL = (
    *(Family(name, _text) for name in (_DECODERS + _ENCODERS + _ENCODER_DECODERS).split()),
    *(Family(name, _text, sizes) for name, sizes in _TEXT_WITH_SIZES.items()),
    *(Family(name, _images(), sizes) for name, sizes in _VISION.items()),
    *(Family(name, _classified(input_values=lambda: torch.randn(BATCH, 400)), _WAVES) for name in _SOUND.split()),
    *_OTHERS,
)
FAMILIES: Mapping[str, Family] = {family.model: family for family in sorted(_ALL, key=lambda f: f.model.lower())}
