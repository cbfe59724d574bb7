"""Models of a few hundred weights whose tensors have the names of SD1, SD2, SDXL and SD3."""

import zlib

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 16
CONTEXT = 8


class _LayerNorm(nn.LayerNorm):
    """Computes in float32 whatever the dtype of its parameters, as the CPU needs it."""

    def forward(self, x):
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float()).to(x.dtype)


class _GroupNorm(nn.GroupNorm):
    def forward(self, x):
        return F.group_norm(x.float(), self.num_groups, self.weight.float(), self.bias.float()).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, width, context):
        super().__init__()
        self.norm = _LayerNorm(width)
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(context, width, bias=False)
        self.to_v = nn.Linear(context, width, bias=False)
        self.to_out = nn.Sequential(nn.Linear(width, width))

    def forward(self, x, context):
        weights = torch.softmax(self.to_q(self.norm(x)) @ self.to_k(context).transpose(1, 2), -1)
        return x + self.to_out(weights.to(x.dtype) @ self.to_v(context).to(x.dtype))


class _ResBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.in_layers = nn.Sequential(_GroupNorm(2, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(8, width))
        self.skip_connection = nn.Conv2d(width, width, 1)

    def forward(self, x, emb):
        return self.skip_connection(x) + self.in_layers(x) + self.emb_layers(emb)[..., None, None]


class _UNet(nn.Module):
    def __init__(self, channels_in=4, labels=False):
        super().__init__()
        self.time_embed = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 8))
        if labels:
            self.label_emb = nn.Sequential(nn.Sequential(nn.Linear(4, 8)))
        first = nn.Conv2d(channels_in, WIDTH, 3, padding=1)
        self.input_blocks = nn.ModuleList([nn.ModuleList([first]), nn.ModuleList([_ResBlock(WIDTH)])])
        self.middle_block = nn.ModuleList([_Attention(WIDTH, CONTEXT)])
        self.out = nn.Sequential(_GroupNorm(2, WIDTH), nn.SiLU(), nn.Conv2d(WIDTH, 4, 3, padding=1))
        self.channels_in = channels_in

    def forward(self, x, context):
        emb = self.time_embed(x.new_ones(len(x), 4))
        x = F.pad(x, (0, 0, 0, 0, 0, self.channels_in - x.shape[1]))
        h = self.input_blocks[0][0](x)
        for layer in self.input_blocks[1]:  # other extensions add to it
            h = layer(h, emb)
        seq = h.flatten(2).transpose(1, 2)
        for layer in self.middle_block:
            seq = layer(seq, context.to(h.dtype))
        return self.out(seq.transpose(1, 2).reshape(h.shape))


class QkvLinear(nn.Linear):
    pass


class _MMDiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.x_embedder = nn.Module()
        self.x_embedder.proj = nn.Conv2d(4, WIDTH, 1)
        block = nn.Module()
        block.attn = nn.Module()
        block.attn.qkv = QkvLinear(WIDTH, 3 * WIDTH)
        block.attn.proj = nn.Linear(WIDTH, WIDTH)
        self.joint_blocks = nn.ModuleList([block])
        self.final_layer = nn.Module()
        self.final_layer.linear = nn.Linear(WIDTH, 4)

    def forward(self, x, context):
        h = self.x_embedder.proj(x).flatten(2).transpose(1, 2)
        q, k, v = self.joint_blocks[0].attn.qkv(h).chunk(3, -1)
        h = self.final_layer.linear(self.joint_blocks[0].attn.proj(q * k + v))
        return h.transpose(1, 2).reshape(x.shape)


def _tokens(texts, device):
    return torch.tensor([[len(text) % 4, 1, 2] for text in texts], device=device)


class _ClipLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.q_proj = nn.Linear(CONTEXT, CONTEXT)
        self.mlp = nn.Module()
        self.mlp.fc1 = nn.Linear(CONTEXT, CONTEXT)
        self.layer_norm1 = _LayerNorm(CONTEXT)

    def forward(self, x):
        return x + self.mlp.fc1(self.self_attn.q_proj(self.layer_norm1(x)))


class ClipEmbedder(nn.Module):
    """Laid out like transformers' CLIPTextModel inside ldm's embedder; also does for T5."""

    def __init__(self):
        super().__init__()
        text_model = nn.Module()
        text_model.embeddings = nn.Module()
        text_model.embeddings.token_embedding = nn.Embedding(4, CONTEXT)
        text_model.encoder = nn.Module()
        text_model.encoder.layers = nn.ModuleList([_ClipLayer()])
        self.transformer = nn.Module()
        self.transformer.text_model = text_model

    def forward(self, texts):
        text_model = self.transformer.text_model
        embedding = text_model.embeddings.token_embedding
        return text_model.encoder.layers[0](embedding(_tokens(texts, embedding.weight.device)))


class OpenClipEmbedder(nn.Module):
    """Laid out like open_clip's text tower: its attention is nn.MultiheadAttention."""

    def __init__(self):
        super().__init__()
        block = nn.Module()
        block.attn = nn.MultiheadAttention(CONTEXT, 2)
        block.mlp = nn.Sequential()
        block.mlp.c_fc = nn.Linear(CONTEXT, CONTEXT)
        self.model = nn.Module()
        self.model.token_embedding = nn.Embedding(4, CONTEXT)
        self.model.transformer = nn.Module()
        self.model.transformer.resblocks = nn.ModuleList([block])
        self.model.ln_final = _LayerNorm(CONTEXT)
        self.model.text_projection = nn.Parameter(torch.eye(CONTEXT))

    def forward(self, texts):
        embedding, block = self.model.token_embedding, self.model.transformer.resblocks[0]
        x = embedding(_tokens(texts, embedding.weight.device))
        return self.model.ln_final(block.mlp.c_fc(block.attn(x, x, x, need_weights=False)[0]))


class _Concat(nn.Module):
    def forward(self, texts):
        return None


class _Conditioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedders = nn.ModuleList([ClipEmbedder(), OpenClipEmbedder(), _Concat()])

    def forward(self, texts):
        return sum(found for embedder in self.embedders if (found := embedder(texts)) is not None)


class _SD3Cond(nn.Module):
    def __init__(self):
        super().__init__()
        self.clip_l, self.clip_g, self.t5xxl = ClipEmbedder(), ClipEmbedder(), ClipEmbedder()

    def forward(self, texts):
        return self.clip_l(texts) + self.clip_g(texts) + self.t5xxl(texts)


class StableDiffusion(nn.Module):
    """``kind``: sd1, sd2, sdxl, sd3 or inpaint (SD1 with 9 channels into its first convolution)."""

    lowvram = False

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.model = nn.Module()
        if kind == "sd3":
            self.model.diffusion_model = _MMDiT()
            self.text_encoders = _SD3Cond()
        else:
            self.model.diffusion_model = _UNet(9 if kind == "inpaint" else 4, labels=kind == "sdxl")
            if kind == "sdxl":
                self.conditioner = _Conditioner()
            else:
                self.cond_stage_model = OpenClipEmbedder() if kind == "sd2" else ClipEmbedder()
        self.first_stage_model = nn.ModuleDict({"decoder": nn.Conv2d(4, 3, 1), "post_quant_conv": nn.Linear(4, 4)})
        self.register_buffer("alphas_cumprod", torch.linspace(0.99, 0.01, 11, device="cpu"), persistent=False)

    def get_learned_conditioning(self, texts):
        encoder = getattr(self, "conditioner", None) or getattr(self, "text_encoders", None) or self.cond_stage_model
        return encoder(texts)


def state_dict(kind, seed, dtype):
    """What a checkpoint file of that kind holds: values of the usual size, which float16 cannot hold exactly."""
    generator, values = torch.Generator(), {}
    for name, tensor in StableDiffusion(kind).state_dict().items():
        generator.manual_seed(seed + zlib.crc32(name.encode()))
        spread = 1.0 if tensor.dim() < 2 else 0.05
        values[name] = (torch.randn(tensor.shape, generator=generator) * spread).to(dtype)
    return values
