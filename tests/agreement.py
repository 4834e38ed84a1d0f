"""Results and gradients of an operation beside those of another implementation."""

import torch

#: (RMS of the error over the reference's, largest error over the same) by dtype.
TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (5e-3, 0.1), torch.float16: (5e-3, 0.1)}


def assert_agree(found, expected, dtype):
    """Compare tensors by name, as DESIGN.md P10 wants for a dtype of the inputs."""
    assert found.keys() == expected.keys()
    rms, worst = TOLERANCE[dtype]
    for name, x in found.items():
        assert x.shape == expected[name].shape, name
        if x.numel() == 0:
            continue
        exact = expected[name].double()
        error, size = x.double() - exact, exact.square().mean().sqrt().clamp(min=1e-6)
        assert error.square().mean().sqrt() <= rms * size, name
        assert error.abs().max() <= worst * exact.abs().max().clamp(min=1e-6), name


def run_attend(attend, inputs, impl, dtype=None, grad_lse=True):
    """Return out, lse and the gradients of an attend of ``inputs`` by name; None is left out."""
    given = {name: None if x is None else x.detach().to(dtype) for name, x in inputs.items()}
    leaves = {name: x.requires_grad_() for name, x in given.items() if x is not None}
    out, lse = attend(impl=impl, **given)
    is_read = lse.isfinite()
    generator = torch.Generator().manual_seed(11)
    weight, of_lse = (
        torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, lse)
    )
    weight = weight.to(inputs["q"].dtype).to(out.dtype)
    loss = (out * weight).sum()
    if grad_lse:
        loss = loss + (lse.where(is_read, 0) * of_lse.to(lse.dtype)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    found = {"out": out.detach(), "lse": lse.detach().where(is_read, 0), "read": is_read}
    return found | {f"grad_{n}": g for n, g in zip(leaves, grads, strict=True)}
