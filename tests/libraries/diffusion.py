"""diffusers: networks that remove noise, schedules of noise, and autoencoders of images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    DDIMPipeline,
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    UNet2DConditionModel,
    UNet2DModel,
    VQModel,
)
from diffusers.training_utils import EMAModel

from tests.libraries.programs import noise, program, trained, weights


def unet(device: str) -> UNet2DModel:
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    ).to(device)  # fmt: skip


def denoising(model: Any, scheduler: Any, device: str, **more: Any) -> Any:
    """Compute the loss of a network that predicts which noise was added."""
    images, added = noise(4, 3, 8, 8).to(device), noise(4, 3, 8, 8, seed=4).to(device)
    times = torch.tensor([10, 200, 500, 900]).to(device)

    def loss() -> torch.Tensor:
        noisy = scheduler.add_noise(images, added, times)
        return F.mse_loss(model(noisy, times, **more).sample, added)

    return loss


@program
def a_unet_trained_with_an_average(device: str) -> object:
    model = unet(device)
    average = EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True)
    average.to(device)
    losses = trained(
        model, denoising(model, DDPMScheduler(), device), steps=4,
        after=lambda: average.step(model.parameters()),
    )  # fmt: skip
    trained_weights = weights(model)
    average.store(model.parameters())
    average.copy_to(model.parameters())
    averaged = weights(model)
    average.restore(model.parameters())
    return losses, averaged, torch.equal(weights(model), trained_weights)


@program
def a_unet_sampled_with_ddim(device: str) -> object:
    pipeline = DDIMPipeline(unet(device), DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator(device).manual_seed(5)
    drawn = pipeline(
        batch_size=2, num_inference_steps=4, eta=0.5, generator=generator, output_type="np"
    ).images
    host = pipeline(
        batch_size=1, num_inference_steps=3, generator=torch.Generator().manual_seed(5),
        output_type="np",
    ).images  # fmt: skip
    return torch.from_numpy(drawn), torch.from_numpy(host)


@program
def schedules_of_noise(device: str) -> object:
    model = unet(device).eval()
    found = {}
    for kind in (
        DDIMScheduler,
        DDPMScheduler,
        EulerDiscreteScheduler,
        EulerAncestralDiscreteScheduler,
        DPMSolverMultistepScheduler,
    ):
        scheduler = kind()
        scheduler.set_timesteps(4, device=device)
        generator = torch.Generator(device).manual_seed(7)
        image = noise(1, 3, 8, 8).to(device) * scheduler.init_noise_sigma
        more = {"generator": generator}
        with torch.no_grad():
            for time in scheduler.timesteps:
                scaled = scheduler.scale_model_input(image, time)
                image = scheduler.step(model(scaled, time).sample, time, image, **more).prev_sample
        found[kind.__name__] = image
    return found


@program
def a_unet_under_conditions(device: str) -> object:
    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 16), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=12,
        attention_head_dim=4,
    ).to(device)  # fmt: skip
    condition = noise(4, 5, 12, seed=9).to(device)
    loss = denoising(model, DDPMScheduler(), device, encoder_hidden_states=condition)
    losses = trained(model, loss)
    model.enable_gradient_checkpointing()
    return losses, trained(model, loss)


@program
def an_autoencoder_of_images(device: str) -> object:
    torch.manual_seed(0)
    model = AutoencoderKL(
        block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=4,
    ).to(device)  # fmt: skip
    images = noise(2, 3, 16, 16).to(device)
    generator = torch.Generator(device).manual_seed(3)

    def loss() -> torch.Tensor:
        latent = model.encode(images).latent_dist
        decoded = model.decode(latent.sample(generator)).sample
        return F.mse_loss(decoded, images) + 1e-3 * latent.kl().mean()

    losses = trained(model, loss)
    model.eval()
    with torch.no_grad():
        latent = model.encode(images).latent_dist
        drawn = latent.sample(generator)
        whole = model.decode(drawn).sample
        model.enable_slicing()
        return losses, latent.mode(), drawn, whole, model.decode(drawn).sample


@program
def an_autoencoder_of_codes(device: str) -> object:
    torch.manual_seed(0)
    model = VQModel(
        block_out_channels=(8,), down_block_types=("DownEncoderBlock2D",), num_vq_embeddings=16,
        up_block_types=("UpDecoderBlock2D",), latent_channels=3, norm_num_groups=4,
    ).to(device)  # fmt: skip
    images = noise(2, 3, 8, 8).to(device)
    losses = trained(model, lambda: F.mse_loss(model(images).sample, images))
    return losses, model.eval()(images).sample
