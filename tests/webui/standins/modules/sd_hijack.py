"""Text encoders are wrapped while a model is in use, and bare while weights are loaded."""

import torch


class _WithCustomWords(torch.nn.Module):
    def __init__(self, wrapped):
        super().__init__()
        self.wrapped = wrapped

    def forward(self, texts):
        return self.wrapped(texts)


class StableDiffusionModelHijack:
    clip = None

    def hijack(self, m):
        if hasattr(m, "conditioner"):
            embedders = m.conditioner.embedders
            for i, embedder in enumerate(embedders):
                if hasattr(embedder, "transformer") or hasattr(embedder, "model"):
                    embedders[i] = _WithCustomWords(embedder)
            m.cond_stage_model = m.conditioner
        elif not hasattr(m, "text_encoders"):
            assert not isinstance(m.cond_stage_model, _WithCustomWords)
            m.cond_stage_model = _WithCustomWords(m.cond_stage_model)
        self.clip = getattr(m, "cond_stage_model", m)

    def undo_hijack(self, m):
        if hasattr(m, "conditioner"):
            embedders = m.conditioner.embedders
            for i, embedder in enumerate(embedders):
                embedders[i] = getattr(embedder, "wrapped", embedder)
            del m.cond_stage_model
        elif not hasattr(m, "text_encoders"):
            m.cond_stage_model = m.cond_stage_model.wrapped
        self.clip = None


model_hijack = StableDiffusionModelHijack()
