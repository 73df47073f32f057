"""Attention with a deterministic backward by `nvidia-cudnn-frontend`, if it is installed. Not run yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from parts.measuring import Step
from torch import Tensor


def _new_graph(cudnn: Any, handle: Any) -> Any:
    return cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )


def _built(cudnn: Any, graph: Any, device: torch.device) -> Tensor:
    """Build a graph; return its workspace."""
    graph.build([cudnn.heur_mode.A])
    return torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)


def _declared(cudnn: Any, nodes: Sequence[Any], tensors: Sequence[Tensor]) -> dict[Any, Tensor]:
    """Declare outputs with the layouts of these tensors."""
    for node, tensor in zip(nodes, tensors, strict=True):
        kind = cudnn.data_type.FLOAT if tensor.dtype == torch.float32 else cudnn.data_type.BFLOAT16
        node.set_output(True).set_dim(list(tensor.shape)).set_stride(list(tensor.stride()))
        node.set_data_type(kind)
    return dict(zip(nodes, tensors, strict=True))


def cudnn_step(parts: Sequence[Tensor], above: Tensor) -> Step:
    """Return forward and backward of q, k, v [batch, heads, length, head dim]."""
    import cudnn

    inputs = [part.detach() for part in parts]
    batch, heads, length, head_dim = inputs[0].shape
    settings = {"attn_scale": 1 / math.sqrt(head_dim), "use_causal_mask": True}
    handle = cudnn.create_handle()
    out = torch.empty_like(inputs[0])
    stats = torch.empty(batch, heads, length, 1, device=out.device)
    gradients = [torch.empty_like(part) for part in inputs]

    forward = _new_graph(cudnn, handle)
    nodes = [forward.tensor_like(part) for part in inputs]
    results = forward.sdpa(*nodes, is_inference=False, **settings)
    first = dict(zip(nodes, inputs, strict=True)) | _declared(cudnn, results, [out, stats])
    first_space = _built(cudnn, forward, out.device)

    backward = _new_graph(cudnn, handle)
    given = [*inputs, out, above, stats]
    nodes = [backward.tensor_like(tensor) for tensor in given]
    results = backward.sdpa_backward(*nodes, use_deterministic_algorithm=True, **settings)
    second = dict(zip(nodes, given, strict=True)) | _declared(cudnn, results, gradients)
    second_space = _built(cudnn, backward, out.device)

    def run() -> Sequence[Tensor]:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        forward.execute(first, first_space, handle=handle)
        backward.execute(second, second_space, handle=handle)
        return out, *gradients

    return run
