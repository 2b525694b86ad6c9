"""Models of packages for images and volumes: timm, torchvision, segmentation, detection, diffusion."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.packages.training import Called, Training, classified, model, of, trained

# timm


def _of_timm(name: str, checkpointed: bool, size: int, batch: int = 8, **settings: Any) -> Training:
    found = of("timm.create_model")(name, pretrained=False, num_classes=10, **settings)
    if checkpointed:
        found.set_grad_checkpointing(True)
    return classified(found, torch.randn(batch, 3, size, size))


SWITCH = "set_grad_checkpointing(True)"


@model("timm", "torchvision", own=SWITCH)
def vit(checkpointed: bool) -> Training:
    return _of_timm("vit_tiny_patch16_224", checkpointed, 64, img_size=64, depth=6)


@model("timm", "torchvision", own=SWITCH)
def swin(checkpointed: bool) -> Training:
    return _of_timm(
        "swin_tiny_patch4_window7_224",
        checkpointed,
        56,
        img_size=56,
        window_size=7,
        embed_dim=32,
        num_heads=(1, 2, 4, 8),
    )


@model("timm", "torchvision", own=SWITCH)
def convnext(checkpointed: bool) -> Training:
    return _of_timm("convnext_atto", checkpointed, 64, drop_path_rate=0.1)


@model("timm", "torchvision", own=SWITCH)
def efficientnet(checkpointed: bool) -> Training:
    return _of_timm("efficientnet_b0", checkpointed, 64, drop_rate=0.2, drop_path_rate=0.2)


@model("timm", "torchvision", own=SWITCH)
def resnet(checkpointed: bool) -> Training:
    return _of_timm("resnet18", checkpointed, 64)


@model("timm", "torchvision", own=SWITCH)
def densenet(checkpointed: bool) -> Training:
    return _of_timm("densenet121", checkpointed, 64, growth_rate=16)


@model("timm", "torchvision", own=SWITCH)
def maxvit(checkpointed: bool) -> Training:
    return _of_timm("maxvit_rmlp_pico_rw_256", checkpointed, 64, batch=4, img_size=64)


@model("timm", "torchvision", own=SWITCH)
def mixer(checkpointed: bool) -> Training:
    net = of("timm.models.mlp_mixer.MlpMixer")(num_classes=10, img_size=64, patch_size=8, num_blocks=6, embed_dim=96)
    if checkpointed:
        net.set_grad_checkpointing(True)
    return classified(net, torch.randn(8, 3, 64, 64))


@model("timm", "torchvision", own=SWITCH)
def eva(checkpointed: bool) -> Training:
    return _of_timm("eva02_tiny_patch14_224", checkpointed, 112, batch=4, img_size=112, depth=6)


# torchvision


@model("torchvision")
def resnet_18(checkpointed: bool) -> Training:
    return classified(of("torchvision.models.resnet18")(num_classes=10), torch.randn(8, 3, 64, 64))


@model("torchvision", own="memory_efficient=True")
def densenet_121(checkpointed: bool) -> Training:
    net = of("torchvision.models.densenet121")(num_classes=10, memory_efficient=checkpointed)
    return classified(net, torch.randn(4, 3, 64, 64))


@model("torchvision")
def mobilenet_v3(checkpointed: bool) -> Training:
    return classified(of("torchvision.models.mobilenet_v3_small")(num_classes=10), torch.randn(8, 3, 96, 96))


@model("torchvision")
def swin_t(checkpointed: bool) -> Training:
    swin = of("torchvision.models.SwinTransformer")
    net = swin([4, 4], 32, [2, 2, 2], [2, 4, 8], [7, 7], stochastic_depth_prob=0.2, num_classes=10)
    return classified(net, torch.randn(4, 3, 112, 112))


@model("torchvision")
def deeplab(checkpointed: bool) -> Training:
    net = of("torchvision.models.segmentation.deeplabv3_mobilenet_v3_large")(
        weights_backbone=None, num_classes=5, aux_loss=True
    )
    images, masks = torch.randn(2, 3, 96, 96), torch.randint(5, (2, 96, 96))

    def loss() -> Tensor:
        found = net(images)
        return F.cross_entropy(found["out"], masks) + 0.4 * F.cross_entropy(found["aux"], masks)

    return trained(net, loss)


@model("torchvision")
def video_resnet(checkpointed: bool) -> Training:
    return classified(of("torchvision.models.video.r3d_18")(num_classes=10), torch.randn(1, 3, 8, 48, 48))


@model("torchvision")
def faster_rcnn(checkpointed: bool) -> Training:
    net = of("torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn")(
        weights=None, weights_backbone=None, num_classes=4, min_size=96, max_size=96, rpn_pre_nms_top_n_train=60,
        rpn_post_nms_top_n_train=20, box_batch_size_per_image=16,
    )  # fmt: skip
    images = [torch.rand(3, 96, 96) for _ in range(2)]
    boxes = torch.tensor([[8.0, 8.0, 40.0, 60.0], [30.0, 20.0, 80.0, 90.0]])
    targets = [{"boxes": boxes + k, "labels": torch.tensor([1, 2])} for k in range(2)]
    return trained(net, lambda: sum(net(images, targets).values()))  # type: ignore[arg-type]


def _ops_of_torchvision() -> None:
    """Where its compiled ops are made for another torch, suppression is written here; all else has a Python form."""
    if importlib.util.find_spec("torchvision") is None or hasattr(torch.ops.torchvision, "nms"):
        return
    spec = importlib.util.find_spec("torchvision")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    for library in folder.glob("_C*.so"):
        try:
            ctypes.CDLL(str(library))
            return
        except OSError:
            pass
    for name in ("nms", "qnms"):
        _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARY.impl("nms", _suppressed, "CPU")
    for module in ("extension", "ops.boxes"):
        of(f"torchvision.{module}")._assert_has_ops = lambda: None
    pooling = of("torchvision.ops.roi_align")
    pooling._roi_align = pooling._roi_align.__wrapped__  # Compiling its Python form takes a minute.


_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def _suppressed(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Of boxes that overlap the best one."""
    order = scores.argsort(descending=True, stable=True)
    overlap = (of("torchvision.ops.box_iou")(boxes[order], boxes[order]) > iou_threshold).numpy()
    there = np.ones(len(order), dtype=bool)
    for k in range(len(order)):
        if there[k]:
            there[k + 1 :] &= ~overlap[k, k + 1 :]
    return order[torch.from_numpy(there)]


_ops_of_torchvision()

# segmentation_models_pytorch and monai


def _segmented(net: nn.Module, size: int = 64) -> Training:
    dice = of("segmentation_models_pytorch.losses.DiceLoss")("multiclass")
    images, masks = torch.randn(4, 3, size, size), torch.randint(3, (4, size, size))

    def loss() -> Tensor:
        scores = net(images)
        return dice(scores, masks) + F.cross_entropy(scores, masks)

    return trained(net, loss)


@model("segmentation_models_pytorch")
def unet(checkpointed: bool) -> Training:
    return _segmented(of("segmentation_models_pytorch.Unet")("resnet18", encoder_weights=None, classes=3))


@model("segmentation_models_pytorch")
def fpn(checkpointed: bool) -> Training:
    return _segmented(of("segmentation_models_pytorch.FPN")("mobilenet_v2", encoder_weights=None, classes=3))


@model("segmentation_models_pytorch")
def deeplab_plus(checkpointed: bool) -> Training:
    return _segmented(of("segmentation_models_pytorch.DeepLabV3Plus")("resnet18", encoder_weights=None, classes=3))


@model("segmentation_models_pytorch")
def segformer(checkpointed: bool) -> Training:
    return _segmented(of("segmentation_models_pytorch.Segformer")("mit_b0", encoder_weights=None, classes=3), 96)


@model("segmentation_models_pytorch")
def manet(checkpointed: bool) -> Training:
    return _segmented(of("segmentation_models_pytorch.MAnet")("resnet18", encoder_weights=None, classes=3))


def _segmented_by_dice(net: nn.Module, shape: tuple[int, ...] = (1, 1, 32, 32, 32)) -> Training:
    loss = of("monai.losses.DiceCELoss")(to_onehot_y=True, softmax=True)
    images, masks = torch.randn(shape), torch.randint(2, shape)
    return trained(net, lambda: loss(net(images), masks))


@model("monai")
def u_net(checkpointed: bool) -> Training:
    net = of("monai.networks.nets.UNet")(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32, 64), strides=(2, 2, 2), num_res_units=2
    )
    return _segmented_by_dice(net)


@model("monai", own="use_checkpoint=True")
def swin_unetr(checkpointed: bool) -> Training:
    net = of("monai.networks.nets.SwinUNETR")(
        in_channels=1, out_channels=2, feature_size=12, depths=(2, 2, 1, 1), use_checkpoint=checkpointed, spatial_dims=2
    )
    return _segmented_by_dice(net, (4, 1, 64, 64))


@model("monai")
def unetr(checkpointed: bool) -> Training:
    net = of("monai.networks.nets.UNETR")(
        in_channels=1, out_channels=2, img_size=(32, 32, 32), feature_size=4, hidden_size=48, mlp_dim=96, num_heads=4
    )
    return _segmented_by_dice(net)


@model("monai")
def seg_resnet(checkpointed: bool) -> Training:
    return _segmented_by_dice(
        of("monai.networks.nets.SegResNet")(init_filters=8, in_channels=1, out_channels=2, dropout_prob=0.2)
    )


@model("monai")
def dyn_unet(checkpointed: bool) -> Training:
    net = of("monai.networks.nets.DynUNet")(
        spatial_dims=3, in_channels=1, out_channels=2, kernel_size=[3] * 4, strides=[1, 2, 2, 2],
        upsample_kernel_size=[2] * 3, filters=[8, 16, 32, 64], deep_supervision=True, deep_supr_num=2,
    )  # fmt: skip
    loss = of("monai.losses.DiceCELoss")(to_onehot_y=True, softmax=True)
    images, masks = torch.randn(1, 1, 32, 32, 32), torch.randint(2, (1, 1, 32, 32, 32))

    def supervised() -> Tensor:
        return sum(loss(each, masks) / 2**k for k, each in enumerate(net(images).unbind(1)))  # type: ignore[return-value]

    return trained(net, supervised)


@model("monai", "einops")
def diffusion_unet(checkpointed: bool) -> Training:
    net = of("monai.networks.nets.DiffusionModelUNet")(
        spatial_dims=2, in_channels=1, out_channels=1, channels=(16, 32, 32), attention_levels=(False, True, True),
        num_res_blocks=1, num_head_channels=16, norm_num_groups=8,
    )  # fmt: skip
    return _denoised(lambda noisy, times: net(noisy, timesteps=times), net, torch.randn(4, 1, 32, 32))


def _denoised(predicted: Any, net: nn.Module, images: Tensor) -> Training:
    """Noise is drawn in every step, and found again."""

    def loss() -> Tensor:
        noise, times = torch.randn_like(images), torch.randint(1000, (len(images),))
        share = (times / 1000).view(-1, *[1] * (images.dim() - 1))
        return F.mse_loss(predicted((1 - share).sqrt() * images + share.sqrt() * noise, times), noise)

    return trained(net, loss)


# diffusers


def _own_of_diffusers(net: Any, checkpointed: bool) -> Any:
    if checkpointed:
        net.enable_gradient_checkpointing()
    return net


ENABLE = "enable_gradient_checkpointing()"


@model("diffusers", own=ENABLE)
def unet_2d(checkpointed: bool) -> Training:
    net = of("diffusers.UNet2DModel")(
        sample_size=32, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32, 32),
        norm_num_groups=8, attention_head_dim=8, down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    _own_of_diffusers(net, checkpointed)
    return _denoised(lambda noisy, times: net(noisy, times).sample, net, torch.randn(4, 3, 32, 32))


@model("diffusers", own=ENABLE)
def unet_2d_condition(checkpointed: bool) -> Training:
    net = of("diffusers.UNet2DConditionModel")(
        sample_size=32, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8, attention_head_dim=8,
        cross_attention_dim=32, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    _own_of_diffusers(net, checkpointed)
    text = torch.randn(4, 16, 32)
    return _denoised(lambda noisy, times: net(noisy, times, text).sample, net, torch.randn(4, 4, 16, 16))


@model("diffusers", own=ENABLE)
def autoencoder_kl(checkpointed: bool) -> Training:
    net = of("diffusers.AutoencoderKL")(
        block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1, latent_channels=4, sample_size=64,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    _own_of_diffusers(net, checkpointed)
    images = torch.randn(2, 3, 64, 64)

    def coded(given: Tensor) -> Tensor:
        posterior = net.encode(given).latent_dist
        return F.mse_loss(net.decode(posterior.sample()).sample, given) + 1e-4 * posterior.kl().mean()

    whole = Called(net, coded)
    return trained(whole, lambda: whole(images))


@model("diffusers", own=ENABLE)
def dit(checkpointed: bool) -> Training:
    net = of("diffusers.DiTTransformer2DModel")(
        num_attention_heads=4, attention_head_dim=24, in_channels=4, out_channels=4, num_layers=6, sample_size=16,
        num_embeds_ada_norm=1000, norm_num_groups=8,
    )  # fmt: skip
    _own_of_diffusers(net, checkpointed)
    labels = torch.randint(10, (8,))
    return _denoised(
        lambda noisy, times: net(noisy, timestep=times, class_labels=labels).sample, net, torch.randn(8, 4, 16, 16)
    )


@model("diffusers", own=ENABLE)
def sd3(checkpointed: bool) -> Training:
    net = of("diffusers.SD3Transformer2DModel")(
        sample_size=16, patch_size=1, in_channels=4, num_layers=4, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=64, pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip
    _own_of_diffusers(net, checkpointed)
    text, pooled = torch.randn(2, 12, 32), torch.randn(2, 64)
    return _denoised(
        lambda noisy, times: net(noisy, encoder_hidden_states=text, pooled_projections=pooled, timestep=times).sample,
        net,
        torch.randn(2, 4, 16, 16),
    )


# Others


@model("vit_pytorch", "torchvision")
def simple_vit(checkpointed: bool) -> Training:
    net = of("vit_pytorch.SimpleViT")(
        image_size=64, patch_size=8, num_classes=10, dim=96, depth=6, heads=4, mlp_dim=192
    )
    return classified(net, torch.randn(8, 3, 64, 64))


@model("vit_pytorch", "torchvision")
def cait(checkpointed: bool) -> Training:
    net = of("vit_pytorch.cait.CaiT")(
        image_size=64, patch_size=8, num_classes=10, dim=96, depth=5, cls_depth=2, heads=4, mlp_dim=192, dropout=0.1,
        emb_dropout=0.1, layer_dropout=0.05,
    )  # fmt: skip
    return classified(net, torch.randn(8, 3, 64, 64))


@model("vit_pytorch", "torchvision")
def cct(checkpointed: bool) -> Training:
    net = of("vit_pytorch.cct.CCT")(
        img_size=(64, 64), embedding_dim=96, n_conv_layers=2, num_layers=5, num_heads=4, mlp_ratio=2.0, num_classes=10,
        positional_embedding="learnable",
    )  # fmt: skip
    return classified(net, torch.randn(8, 3, 64, 64))


@model("vit_pytorch", "torchvision")
def cross_vit(checkpointed: bool) -> Training:
    net = of("vit_pytorch.cross_vit.CrossViT")(
        image_size=64, num_classes=10, depth=2, sm_dim=48, sm_patch_size=8, sm_enc_depth=1, sm_enc_heads=4,
        sm_enc_mlp_dim=96, lg_dim=96, lg_patch_size=16, lg_enc_depth=2, lg_enc_heads=4, lg_enc_mlp_dim=192,
    )  # fmt: skip
    return classified(net, torch.randn(8, 3, 64, 64))


@model("vit_pytorch", "torchvision")
def navit(checkpointed: bool) -> Training:
    net = of("vit_pytorch.na_vit.NaViT")(
        image_size=64, patch_size=8, num_classes=10, dim=64, depth=4, heads=4, mlp_dim=128, token_dropout_prob=0.1
    )
    images = [[torch.randn(3, 64, 64), torch.randn(3, 32, 64)], [torch.randn(3, 48, 24), torch.randn(3, 64, 32)]]
    labels = torch.randint(10, (4,))
    return trained(net, lambda: F.cross_entropy(net(images), labels))


def _clip(name: str, checkpointed: bool, **settings: Any) -> Any:
    net = of(f"open_clip.{name}")(
        embed_dim=64,
        vision_cfg={"image_size": 64, "layers": 4, "width": 64, "patch_size": 8, "head_width": 16, **settings},
        text_cfg={"context_length": 16, "vocab_size": 256, "width": 64, "heads": 4, "layers": 4},
    )
    if checkpointed:
        net.set_grad_checkpointing(True)
    return net


@model("open_clip", "torchvision", own=SWITCH)
def clip(checkpointed: bool) -> Training:
    net, loss = _clip("CLIP", checkpointed), of("open_clip.ClipLoss")()
    images, text = torch.randn(16, 3, 64, 64), torch.randint(1, 255, (16, 16))
    return trained(net, lambda: loss(*net(images, text)))


@model("ultralytics", "torchvision", "cv2")
def yolo(checkpointed: bool) -> Training:
    of("ultralytics.utils.LOGGER").setLevel("ERROR")
    net = of("ultralytics.nn.tasks.DetectionModel")("yolov8n.yaml", nc=4, verbose=False)
    net.args = of("ultralytics.cfg.get_cfg")()
    batch = {
        "img": torch.rand(2, 3, 96, 96), "cls": torch.tensor([[0.0], [1.0], [2.0]]),
        "bboxes": torch.tensor([[0.5, 0.5, 0.4, 0.4], [0.3, 0.3, 0.2, 0.3], [0.6, 0.4, 0.5, 0.2]]),
        "batch_idx": torch.tensor([0.0, 0.0, 1.0]),
    }  # fmt: skip
    return trained(net, lambda: net(batch)[0].sum(), torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9))


@model("ultralytics", "torchvision", "cv2")
def yolo_classifier(checkpointed: bool) -> Training:
    of("ultralytics.utils.LOGGER").setLevel("ERROR")
    net = of("ultralytics.nn.tasks.ClassificationModel")("yolo11n-cls.yaml", nc=10, verbose=False)
    batch = {"img": torch.rand(8, 3, 64, 64), "cls": torch.randint(10, (8,))}
    return trained(net, lambda: net(batch)[0])


@model("denoising_diffusion_pytorch", "torchvision")
def gaussian_diffusion(checkpointed: bool) -> Training:
    net = of("denoising_diffusion_pytorch.Unet")(dim=16, dim_mults=(1, 2, 4), attn_dim_head=8, attn_heads=2)
    whole = of("denoising_diffusion_pytorch.GaussianDiffusion")(net, image_size=32, timesteps=100)
    images = torch.rand(4, 3, 32, 32)
    return trained(whole, lambda: whole(images))


@model("segment_anything", "torchvision")
def image_encoder(checkpointed: bool) -> Training:
    net = of("segment_anything.modeling.ImageEncoderViT")(
        img_size=256, embed_dim=48, depth=4, num_heads=4, out_chans=32, use_rel_pos=True, window_size=7,
        global_attn_indexes=(1, 3),
    )  # fmt: skip
    images, goal = torch.randn(1, 3, 256, 256), torch.randn(1, 32, 16, 16)
    return trained(net, lambda: F.mse_loss(net(images), goal))


@model("kornia", "kornia_rs")
def edges(checkpointed: bool) -> Training:
    net = of("kornia.models.dexined.DexiNed")(pretrained=False)
    turned = of("kornia.augmentation.RandomHorizontalFlip")(p=0.5)
    images, goal = torch.rand(1, 3, 64, 64), (torch.rand(1, 1, 64, 64) > 0.8).float()

    def loss() -> Tensor:
        both = turned(torch.cat([images, goal], 1))
        found = net(both[:, :3])
        return sum(F.binary_cross_entropy_with_logits(each.view_as(goal), both[:, 3:]) for each in found)  # type: ignore[return-value]

    return trained(net, loss)


@model("pytorch_metric_learning", "torchvision")
def triplets(checkpointed: bool) -> Training:
    trunk = of("torchvision.models.resnet18")(num_classes=32)
    loss, mined = (
        of("pytorch_metric_learning.losses.TripletMarginLoss")(),
        of("pytorch_metric_learning.miners.MultiSimilarityMiner")(),
    )
    images, labels = torch.randn(8, 3, 64, 64), torch.arange(8) // 2

    def value() -> Tensor:
        embedded = trunk(images)
        return loss(embedded, labels, mined(embedded, labels))

    return trained(trunk, value)
