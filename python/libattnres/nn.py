# SPDX-License-Identifier: Apache-2.0
"""Modules over :func:`libattnres.attn_res`: one call site, and the residual stream of a whole model.

:class:`AttnResStack` keeps its weights under the names that a Kimi K3 checkpoint has for them, once the
prefix of the language model (``language_model.model.``) is taken off:

====================================================== ======== ===============================
name                                                   shape    argument of ``attn_res``
====================================================== ======== ===============================
``layers.<l>.self_attention_res_norm.weight``          [H]      ``norm_weight`` before attention
``layers.<l>.self_attention_res_proj.weight``          [1, H]   ``qk_weight``
``layers.<l>.input_layernorm.weight``                  [H]      ``output_norm_weight``
``layers.<l>.mlp_res_norm.weight``                     [H]      ``norm_weight`` before the MLP
``layers.<l>.mlp_res_proj.weight``                     [1, H]   ``qk_weight``
``layers.<l>.post_attention_layernorm.weight``         [H]      ``output_norm_weight``
``output_attn_res_norm.weight``                        [H]      ``norm_weight`` after the last layer
``output_attn_res_proj.weight``                        [1, H]   ``qk_weight``
====================================================== ======== ===============================

The names are those of the public implementations: vLLM (``vllm/models/kimi_k3/nvidia/model.py``) and SGLang
(``python/sglang/srt/models/kimi_k3.py``) load them from the checkpoint as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from libattnres import _two_phase_plan
from libattnres._api import attn_res
from libattnres._ops import any_dtensor
from libattnres._two_phase import attn_res_bank, attn_res_merge
from libattnres._two_phase_plan import Choice

__all__ = ["AttnRes", "AttnResLayer", "AttnResStack", "HandOver", "MixedBank", "Stream"]

MAX_BANK_BYTES = 4 << 30
"""What a bank pass of :class:`AttnResStack` leaves at most, by default: 24 calls of 12,000 tokens."""
MAX_BLOCKS = 8
"""Bank rows that the operator reads at most."""

_WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class MixedBank(NamedTuple):
    """The bank's share of the calls of several call sites, of which ``first_site`` is the first."""

    bank: torch.Tensor
    """``[S, M, H]``."""
    lse: torch.Tensor
    """``[S, M]``."""
    first_site: int
    is_fresh: bool
    """Whether no other kernel lies between the bank pass and the next call."""


class Stream(NamedTuple):
    """The residual stream between two sub-layers."""

    prefix: torch.Tensor
    """``[M, H]``, running residual of the block that is open; updated in place by the next call."""
    blocks: torch.Tensor
    """``[M, R, H]``, the bank; rows of blocks that are not open yet are uninitialised."""
    mixed: MixedBank | None = None
    """The bank's share of the calls until its next write, whose memory the next bank pass may take; None in
    one phase, which is right at any time."""


class HandOver(NamedTuple):
    """What one pipeline stage gives the next."""

    prefix: torch.Tensor
    """``[M, H]``, with the output of the stage's last MLP added."""
    bank: torch.Tensor
    """``[M, rows, H]``, one row for each block that was opened so far."""


class AttnRes(nn.Module):
    """One call site of Attention Residuals: the weights and options of :func:`libattnres.attn_res`.

    The operator has no backward, so the parameters do not require grad. A new module attends uniformly:
    norm weights are one and the query is zero.

    Parameters
    ----------
    hidden_size : int
        ``H``.
    output_norm : bool
        Whether the output is normalised; without it there is no ``output_norm_weight``.
    eps, output_norm_eps : float
        Epsilons of the scores' and of the output's norm.
    backend, pdl, batch_invariant
        As for :func:`libattnres.attn_res`.
    device, dtype
        Of the parameters.
    """

    output_norm_weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        *,
        output_norm: bool = True,
        eps: float = 1e-5,
        output_norm_eps: float = 1e-5,
        backend: str | None = None,
        pdl: str = "wait",
        batch_invariant: bool | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.output_norm_eps = output_norm_eps
        self.backend = backend
        self.pdl = pdl
        self.batch_invariant = batch_invariant
        self.norm_weight = _weight(hidden_size, fill=1.0, device=device, dtype=dtype)
        self.qk_weight = _weight(hidden_size, fill=0.0, device=device, dtype=dtype)
        if output_norm:
            self.output_norm_weight = _weight(hidden_size, fill=1.0, device=device, dtype=dtype)
        else:
            self.register_parameter("output_norm_weight", None)

    def forward(
        self,
        prefix: torch.Tensor,
        delta: torch.Tensor | None,
        blocks: torch.Tensor,
        num_blocks: int,
        block_write_idx: int = -1,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``attn_res`` with the weights of this site; updates ``prefix`` and ``blocks`` as it does.

        Parameters
        ----------
        prefix, delta : torch.Tensor
            ``[M, H]``; ``delta`` may be None.
        blocks : torch.Tensor
            ``[T, R, H]``.
        num_blocks, block_write_idx, out
            As for :func:`libattnres.attn_res`.

        Returns
        -------
        torch.Tensor
            ``[M, H]``.
        """
        return attn_res(
            prefix,
            delta,
            blocks,
            self.norm_weight,
            self.qk_weight,
            self.output_norm_weight,
            num_blocks,
            block_write_idx,
            self.eps,
            self.output_norm_eps,
            out=out,
            backend=self.backend,
            pdl=self.pdl,
            batch_invariant=self.batch_invariant,
        )

    def extra_repr(self) -> str:
        """For ``repr``."""
        return f"{self.hidden_size}, output_norm={self.output_norm_weight is not None}, eps={self.eps}"


class AttnResLayer(nn.Module):
    """The weights of one layer's two call sites, under the names of a Kimi K3 checkpoint."""

    def __init__(self, hidden_size: int, **where: Any) -> None:
        super().__init__()
        self.self_attention_res_norm = _Weight(hidden_size, fill=1.0, **where)
        self.self_attention_res_proj = _Weight(1, hidden_size, fill=0.0, **where)
        self.input_layernorm = _Weight(hidden_size, fill=1.0, **where)
        self.mlp_res_norm = _Weight(hidden_size, fill=1.0, **where)
        self.mlp_res_proj = _Weight(1, hidden_size, fill=0.0, **where)
        self.post_attention_layernorm = _Weight(hidden_size, fill=1.0, **where)


class AttnResStack(nn.Module):
    """The residual stream of a model shaped like Kimi K3, or of one pipeline stage of it.

    It owns the AttnRes weights and knows, for each layer, how many bank rows to read, when to write one and
    when a new block replaces the prefix. The sub-layers are the model's own::

        stream, output = stack.begin(embeddings), None
        for layer in stack.layer_range:
            hidden, stream = stack.before_attention(layer, stream, output)
            hidden, stream = stack.before_mlp(layer, stream, attention[layer](hidden))
            output = mlp[layer](hidden)
        hidden = stack.finish(stream, output)      # or stack.hand_over(stream, output)

    which :meth:`forward` does as well. Everything is per token: under sequence parallelism each rank passes
    its own tokens, gathers what the sub-layers need and scatters what they return. Runs eagerly, in one graph
    of ``torch.compile``, and captured into a CUDA graph after :func:`libattnres.warmup`.

    Parameters
    ----------
    num_layers, hidden_size : int
        Layers of the whole model, and ``H``.
    block_size : int
        Layers per block, ``attn_res_block_size`` of a Kimi K3 configuration. At most 8 blocks.
    eps, output_norm_eps : float
        Epsilons of the scores' and of the output's norms.
    first_layer, end_layer : int
        Layers of this pipeline stage, ``first_layer <= l < end_layer``; all by default. The stage that has
        the last layer has the weights of the call after it too.
    backend, pdl, batch_invariant
        As for :func:`libattnres.attn_res`.
    two_phase : bool, optional
        Whether the bank is read once for all calls until its next write, by :func:`libattnres.attn_res_bank`,
        rather than by each of them. By default where it pays, which :meth:`explain` says. DTensors always run
        in one phase.
    bank_dtype : torch.dtype, optional
        Of what a bank pass leaves: that of the rows by default, or ``torch.float32``.
    max_bank_bytes : int, optional
        What a bank pass may leave in memory; where it would be more, it serves fewer calls, and the bank is
        read again for the rest. None for no limit.
    device, dtype
        Of the parameters, which do not require grad.
    """

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        block_size: int,
        *,
        eps: float = 1e-5,
        output_norm_eps: float = 1e-5,
        first_layer: int = 0,
        end_layer: int | None = None,
        backend: str | None = None,
        pdl: str = "wait",
        batch_invariant: bool | None = None,
        two_phase: bool | None = None,
        bank_dtype: torch.dtype | None = None,
        max_bank_bytes: int | None = MAX_BANK_BYTES,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        end_layer = num_layers if end_layer is None else end_layer
        for name, value in (("hidden_size", hidden_size), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name}: expected a number >= 1, got {value}")
        if not 1 <= num_layers <= MAX_BLOCKS * block_size:
            raise ValueError(
                f"num_layers: expected 1..{MAX_BLOCKS * block_size} for {MAX_BLOCKS} blocks of {block_size} "
                f"layers, got {num_layers}"
            )
        if not 0 <= first_layer < end_layer <= num_layers:
            raise ValueError(
                f"end_layer: expected 0 <= first_layer < end_layer <= {num_layers}, "
                f"got {first_layer} and {end_layer}"
            )
        if two_phase is not None and not isinstance(two_phase, bool):
            raise TypeError(f"two_phase: expected a bool or None, got {type(two_phase).__name__}")
        if max_bank_bytes is not None and max_bank_bytes < 1:
            raise ValueError(f"max_bank_bytes: expected a number >= 1 or None, got {max_bank_bytes}")
        self.num_layers = num_layers
        self.hidden_size = hidden_size
        self.block_size = block_size
        self.eps = eps
        self.output_norm_eps = output_norm_eps
        self.first_layer = first_layer
        self.end_layer = end_layer
        self.backend = backend
        self.pdl = pdl
        self.batch_invariant = batch_invariant
        self.two_phase = two_phase
        if bank_dtype is not None and not isinstance(bank_dtype, torch.dtype):
            raise TypeError(f"bank_dtype: expected a torch.dtype or None, got {type(bank_dtype).__name__}")
        self.bank_dtype = bank_dtype
        self.max_bank_bytes = max_bank_bytes
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        # By the layer's number in the whole model, as in the checkpoint.
        self.layers = nn.ModuleDict(
            {str(layer): AttnResLayer(hidden_size, **where) for layer in self.layer_range}
        )
        if self.is_last_stage:
            self.output_attn_res_norm = _Weight(hidden_size, fill=1.0, **where)
            self.output_attn_res_proj = _Weight(1, hidden_size, fill=0.0, **where)
        self._site_weights = SiteWeights(self._norms_and_queries())
        self.register_load_state_dict_post_hook(_tie_again)  # type: ignore[no-untyped-call]
        self._tie_early()

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> AttnResStack:
        """For a Hugging Face configuration of Kimi K3, as an object or a mapping.

        Reads ``num_hidden_layers``, ``hidden_size``, ``attn_res_block_size`` and ``rms_norm_eps`` from it, or
        from its ``text_config`` where it has one.

        Parameters
        ----------
        config : object
            ``AutoConfig.from_pretrained(...)`` or the parsed ``config.json``.
        **options
            Of the constructor.
        """

        def get(source: Any, name: str) -> Any:
            return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)

        text = get(config, "text_config")
        values = []
        for name in ("num_hidden_layers", "hidden_size", "attn_res_block_size", "rms_norm_eps"):
            value = get(config if text is None else text, name)
            if value is None:
                raise ValueError(f"config: expected one with {name}, got none")
            values.append(value)
        num_layers, hidden_size, block_size, eps = values
        return cls(num_layers, hidden_size, block_size, **{"eps": eps, "output_norm_eps": eps, **options})

    @property
    def layer_range(self) -> range:
        """The layers of this stage."""
        return range(self.first_layer, self.end_layer)

    @property
    def is_last_stage(self) -> bool:
        """Whether the last layer is one of this stage's."""
        return self.end_layer == self.num_layers

    @property
    def num_inherited_rows(self) -> int:
        """Bank rows that earlier stages have written."""
        return self._blocks_before(self.first_layer)

    @property
    def num_bank_rows(self) -> int:
        """Bank rows that are written when this stage has run."""
        return self._blocks_before(self.end_layer)

    def explain(self, num_tokens: int) -> dict[int, Choice]:
        """Where calls run in two phases, and why or why not.

        Parameters
        ----------
        num_tokens : int
            ``M``.

        Returns
        -------
        dict
            By the call site after which the choice is made: ``2 l`` is the call before the attention of layer
            ``l``, ``2 l + 1`` the one before its MLP, ``2 num_layers`` the one after the last layer. Each
            choice holds until the next write, or the end of the stage.
        """
        weight = next(self.parameters())
        first, end = 2 * self.first_layer, 2 * self.end_layer + self.is_last_stage
        sites = [first, *(site for site in range(first + 1, end) if site % (2 * self.block_size) == 1)]
        return {site: self._choice(site, num_tokens, weight.device, weight.dtype) for site in sites}

    def begin(self, hidden_states: torch.Tensor, bank: torch.Tensor | None = None) -> Stream:
        """The stream before the stage's first layer.

        Parameters
        ----------
        hidden_states : torch.Tensor
            ``[M, H]``: the embeddings, which stay as they are, or the prefix that the stage before handed
            over, which is updated in place.
        bank : torch.Tensor, optional
            ``[M, rows, H]``: the bank that was handed over, or memory for this step's. With ``num_bank_rows``
            rows it is used as it is and written; with fewer, but the inherited ones, it is copied. By
            default the first stage allocates one.

        Returns
        -------
        Stream
            For :meth:`before_attention`.
        """
        inherited, rows = self.num_inherited_rows, self.num_bank_rows
        if bank is not None and bank.shape[1] >= rows:
            return Stream(hidden_states, bank)
        available = 0 if bank is None else bank.shape[1]
        if available < inherited:
            raise ValueError(f"bank: expected [M, rows, H] with rows >= {inherited}, got {available} rows")
        blocks = torch.empty_like(  # placed as the hidden states, where those are a DTensor
            hidden_states[:, None].expand(-1, rows, -1), memory_format=torch.contiguous_format
        )
        if bank is not None and inherited > 0:
            blocks[:, :inherited].copy_(bank[:, :inherited])
        return Stream(hidden_states, blocks)

    def before_attention(
        self, layer: int, stream: Stream, mlp_output: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """The normalised input of a layer's attention; opens a block in every ``block_size``-th layer.

        Parameters
        ----------
        layer : int
            Its number in the whole model.
        stream : Stream
            From :meth:`begin` or :meth:`before_mlp`.
        mlp_output : torch.Tensor, optional
            ``[M, H]``, of the layer before; None for the stage's first layer.

        Returns
        -------
        hidden, stream
            ``[M, H]``, and the stream for :meth:`before_mlp`.
        """
        weights = self._layer(layer)
        if (mlp_output is None) != (layer == self.first_layer):
            expected = "None before the stage's first layer" if mlp_output is not None else "a tensor"
            raise ValueError(f"mlp_output: expected {expected}, got {type(mlp_output).__name__}")
        opens_block = layer % self.block_size == 0
        hidden, stream = self._attn_res(
            2 * layer,
            stream,
            mlp_output,
            weights.self_attention_res_norm.weight,
            weights.self_attention_res_proj.weight,
            weights.input_layernorm.weight,
            layer // self.block_size if opens_block else -1,
        )
        if opens_block:
            stream = stream._replace(mixed=self._mixed_bank(2 * layer + 1, stream))
        return hidden, stream

    def before_mlp(
        self, layer: int, stream: Stream, attention_output: torch.Tensor
    ) -> tuple[torch.Tensor, Stream]:
        """The normalised input of a layer's MLP.

        Parameters
        ----------
        layer : int
            As in the :meth:`before_attention` before it.
        stream : Stream
            From it.
        attention_output : torch.Tensor
            ``[M, H]``. In a layer that opens a block it becomes the prefix, and is updated in place from
            then on.

        Returns
        -------
        hidden, stream
            ``[M, H]``, and the stream for the next layer, :meth:`hand_over` or :meth:`finish`.
        """
        weights = self._layer(layer)
        delta: torch.Tensor | None = attention_output
        if layer % self.block_size == 0:
            stream, delta = stream._replace(prefix=attention_output), None
        return self._attn_res(
            2 * layer + 1,
            stream,
            delta,
            weights.mlp_res_norm.weight,
            weights.mlp_res_proj.weight,
            weights.post_attention_layernorm.weight,
            -1,
        )

    def finish(self, stream: Stream, mlp_output: torch.Tensor) -> torch.Tensor:
        """The hidden states after the last layer, before the model's final norm.

        Parameters
        ----------
        stream : Stream
            From the last :meth:`before_mlp`.
        mlp_output : torch.Tensor
            ``[M, H]``, of the last layer.

        Returns
        -------
        torch.Tensor
            ``[M, H]``.
        """
        if not self.is_last_stage:
            raise ValueError(
                f"end_layer: expected {self.num_layers} for the call after the stack, got {self.end_layer}; "
                "use hand_over"
            )
        hidden, _ = self._attn_res(
            2 * self.num_layers,
            stream,
            mlp_output,
            self.output_attn_res_norm.weight,
            self.output_attn_res_proj.weight,
            None,
            -1,
        )
        return hidden

    def hand_over(self, stream: Stream, mlp_output: torch.Tensor) -> HandOver:
        """What the next pipeline stage begins with: ``next_stack.begin(*hand_over)``.

        The sum is the one that the operator would make, to the bit; ``stream.prefix`` is updated in place.

        Parameters
        ----------
        stream : Stream
            From the stage's last :meth:`before_mlp`.
        mlp_output : torch.Tensor
            ``[M, H]``, of the stage's last layer.
        """
        return HandOver(stream.prefix.add_(mlp_output), stream.blocks[:, : self.num_bank_rows])

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention: Callable[[int, torch.Tensor], torch.Tensor],
        mlp: Callable[[int, torch.Tensor], torch.Tensor],
        *,
        bank: torch.Tensor | None = None,
        gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
        scatter: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor | HandOver:
        """Run the stage's layers.

        Parameters
        ----------
        hidden_states, bank : torch.Tensor
            As for :meth:`begin`.
        attention, mlp : callable
            ``(layer, hidden) -> output``, ``[tokens, H]`` both.
        gather, scatter : callable, optional
            Sequence parallelism: ``gather`` makes a sub-layer's input from this rank's tokens (all-gather),
            ``scatter`` makes this rank's tokens from its partial output (reduce-scatter).

        Returns
        -------
        torch.Tensor or HandOver
            :meth:`finish` in the last stage, else :meth:`hand_over`.
        """

        def run(
            sublayer: Callable[[int, torch.Tensor], torch.Tensor], layer: int, hidden: torch.Tensor
        ) -> torch.Tensor:
            output = sublayer(layer, hidden if gather is None else gather(hidden))
            return output if scatter is None else scatter(output)

        stream = self.begin(hidden_states, bank)
        output: torch.Tensor | None = None
        for layer in self.layer_range:
            hidden, stream = self.before_attention(layer, stream, output)
            hidden, stream = self.before_mlp(layer, stream, run(attention, layer, hidden))
            output = run(mlp, layer, hidden)
        assert output is not None  # a stage has a layer
        return self.finish(stream, output) if self.is_last_stage else self.hand_over(stream, output)

    def load_checkpoint(
        self,
        weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        prefix: str | None = None,
        rename: Callable[[str], str] | None = None,
    ) -> set[str]:
        """Load this stage's weights from a checkpoint of the whole model.

        ``load_state_dict`` does when the names are exactly those of this module.

        Parameters
        ----------
        weights : mapping or iterable of pairs
            Names and tensors, such as a state dict or what a reader of safetensors yields; other tensors
            are passed over.
        prefix : str, optional
            What comes before ``layers.`` in the names: ``"language_model.model."`` in Kimi K3's. By default
            whatever comes before the names that AttnRes alone has, which must be one prefix.
        rename : callable, optional
            Gives a checkpoint's name that of the table above, for formats that have others.

        Returns
        -------
        set of str
            The checkpoint's names that were loaded.
        """
        wanted = dict(self.named_parameters())
        found: dict[str, dict[str, tuple[str, torch.Tensor]]] = {}
        for original, tensor in weights.items() if isinstance(weights, Mapping) else weights:
            name = original if rename is None else rename(original)
            match = _CHECKPOINT_NAME.fullmatch(name)
            if match is None or match["name"] not in wanted:
                continue
            part = found.setdefault(match["prefix"], {})
            if match["name"] in part:
                raise ValueError(f"weights: expected one {name}, got {part[match['name']][0]} and {original}")
            part[match["name"]] = (original, tensor)
        if prefix is None:
            # A vision tower has an input_layernorm as well, but no residual query.
            prefixes = [key for key, part in found.items() if any("_res_" in name for name in part)]
            if len(prefixes) != 1:
                raise ValueError(f"prefix: expected one in front of the AttnRes weights, got {prefixes}")
            prefix = prefixes[0]
        chosen = found.get(prefix, {})
        missing = sorted(wanted.keys() - chosen.keys())
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            names = ", ".join(prefix + name for name in missing[:3])
            raise ValueError(f"weights: expected {names}{more}, got none of that name")
        state = {}
        for name, (original, tensor) in chosen.items():
            shape, dtype = wanted[name].shape, wanted[name].dtype
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{original}: expected a torch.Tensor, got {type(tensor).__name__}")
            if tensor.dtype not in _WEIGHT_DTYPES:  # a cast would drop the scales of a quantised one
                expected = ", ".join(map(str, _WEIGHT_DTYPES))
                raise ValueError(f"{original}: expected dtype {expected}, got {tensor.dtype}")
            if tensor.numel() != shape.numel():
                raise ValueError(f"{original}: expected shape {list(shape)}, got {list(tensor.shape)}")
            state[name] = tensor.detach().reshape(shape).to(dtype)
        self.load_state_dict(state, assign=any(parameter.is_meta for parameter in self.parameters()))
        return {original for original, _ in chosen.values()}

    def extra_repr(self) -> str:
        """For ``repr``."""
        return (
            f"{self.num_layers}, {self.hidden_size}, block_size={self.block_size}, eps={self.eps}, "
            f"layers {self.first_layer}..{self.end_layer - 1}"
        )

    def _blocks_before(self, layer: int) -> int:
        """Blocks that the layers before this one have opened."""
        return -(-layer // self.block_size)

    def _layer(self, layer: int) -> AttnResLayer:
        if layer not in self.layer_range:
            raise ValueError(f"layer: expected {self.first_layer}..{self.end_layer - 1}, got {layer}")
        weights = self.layers[str(layer)]
        assert isinstance(weights, AttnResLayer)
        return weights

    def _attn_res(
        self,
        site: int,
        stream: Stream,
        delta: torch.Tensor | None,
        norm_weight: torch.Tensor,
        proj_weight: torch.Tensor,
        output_norm_weight: torch.Tensor | None,
        block_write_idx: int,
    ) -> tuple[torch.Tensor, Stream]:
        """A call in one phase, or from the bank's share of it where there is one."""
        mixed = stream.mixed
        if mixed is not None and not 0 <= site - mixed.first_site <= mixed.bank.shape[0]:
            mixed = None  # of other calls
        if mixed is None and site == 2 * self.first_layer:
            mixed = self._mixed_bank(site, stream)  # a stage goes on within a block
        elif mixed is not None and site == mixed.first_site + mixed.bank.shape[0]:
            mixed = self._mixed_bank(site, stream)  # the calls of one pass are over
        if mixed is None:
            hidden = attn_res(
                stream.prefix,
                delta,
                stream.blocks,
                norm_weight,
                proj_weight.squeeze(0),
                output_norm_weight,
                self._blocks_before_site(site),
                block_write_idx,
                self.eps,
                self.output_norm_eps,
                backend=self.backend,
                pdl=self.pdl,
                batch_invariant=self.batch_invariant,
            )
            return hidden, stream._replace(mixed=None)
        index = site - mixed.first_site
        hidden = attn_res_merge(
            stream.prefix,
            delta,
            mixed.bank[index],
            mixed.lse[index],
            norm_weight,
            proj_weight.squeeze(0),
            output_norm_weight,
            None if block_write_idx == -1 else stream.blocks,
            block_write_idx,
            self.eps,
            self.output_norm_eps,
            backend=self.backend,
            # What may be read early must not come from the kernel right before.
            pdl="wait" if mixed.is_fresh and self.pdl == "early" else self.pdl,
            batch_invariant=self.batch_invariant,
        )
        return hidden, stream._replace(mixed=mixed._replace(is_fresh=False))

    def _mixed_bank(self, site: int, stream: Stream) -> MixedBank | None:
        """The bank's share of the calls from a site on, until the next write; None in one phase."""
        blocks = stream.blocks
        if any_dtensor(blocks):
            return None
        if not self._choice(site, blocks.shape[0], blocks.device, blocks.dtype).two_phase:
            return None
        num_sites = self._sites_per_pass(site, blocks.shape[0], blocks.dtype)
        memory: dict[str, torch.Tensor] = {}
        used = stream.mixed
        # A compiler finds for itself what memory is free. The pass waits for the calls that read this.
        if used is not None and not torch.compiler.is_compiling() and used.bank.shape[0] >= num_sites:
            memory = {"bank": used.bank[:num_sites], "lse": used.lse[:num_sites]}
        norm_weights, qk_weights, are_new = self._site_weights.of(site - 2 * self.first_layer, num_sites)
        bank, lse = attn_res_bank(
            blocks,
            self._blocks_before_site(site),
            norm_weights,
            qk_weights,
            self.eps,
            **memory,
            bank_dtype=self.bank_dtype,
            backend=self.backend,
            # The row that was written comes from the kernel right before; weights are read before the wait.
            pdl="off" if are_new else "wait" if self.pdl == "early" else self.pdl,
            batch_invariant=self.batch_invariant,
        )
        # After a write the block's first sub-layer comes next.
        return MixedBank(bank, lse, site, is_fresh=site % (2 * self.block_size) != 1)

    def _choice(self, site: int, num_tokens: int, device: torch.device, dtype: torch.dtype) -> Choice:
        """Whether the calls from a site on until the next write run in two phases."""
        num_blocks, num_sites = self._blocks_before_site(site), self._sites_per_pass(site, num_tokens, dtype)
        if num_blocks < 1:
            return Choice(False, "no bank row is read")
        if self.two_phase is not None:
            return Choice(self.two_phase, f"two_phase={self.two_phase} was asked for")
        if self.bank_dtype not in (None, dtype):
            return Choice(False, f"only a bank of the rows' type gains by it, it is {self.bank_dtype}")
        return _two_phase_plan.choose(
            num_blocks,
            num_tokens,
            num_sites,
            self.hidden_size,
            device,
            dtype,
            self.backend,
            self.batch_invariant,
        )

    def _blocks_before_site(self, site: int) -> int:
        """Bank rows that the call at a site reads: site 2 l comes before the attention of layer l."""
        return self._blocks_before((site + 1) // 2)

    def _sites_until_write(self, site: int) -> int:
        """Calls of this stage that read the same rows, from a site on; the next that writes is the last."""
        last = 2 * self.num_layers if self.is_last_stage else 2 * self.end_layer - 1
        return min(2 * self.block_size * self._blocks_before_site(site), last) + 1 - site

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> AttnResStack:
        """Every move of the parameters."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie_early()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, whose parameters have memory of their own."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._tie_early()

    def _tie_early(self) -> None:
        """Before a graph is traced or captured, where passes are to be expected."""
        weight = next(self.parameters())
        if (
            self.two_phase
            or (self.two_phase is None and weight.is_cuda)
            or self._site_weights.norms is not None
        ):
            self._site_weights.tie()

    def _sites_per_pass(self, site: int, num_tokens: int, dtype: torch.dtype) -> int:
        """How many of them the next bank pass serves."""
        return _two_phase_plan.sites_per_pass(
            self._sites_until_write(site),
            num_tokens,
            self.hidden_size,
            (dtype if self.bank_dtype is None else self.bank_dtype).itemsize,
            self.max_bank_bytes,
        )

    def _norms_and_queries(self) -> list[tuple[_Weight, _Weight]]:
        """Of every call site, in order."""
        pairs = []
        for layer in self.layer_range:
            weights = self._layer(layer)
            pairs.append((weights.self_attention_res_norm, weights.self_attention_res_proj))
            pairs.append((weights.mlp_res_norm, weights.mlp_res_proj))
        if self.is_last_stage:
            pairs.append((self.output_attn_res_norm, self.output_attn_res_proj))
        return pairs


_CHECKPOINT_NAME = re.compile(
    r"(?P<prefix>(?:.*\.)?)"
    r"(?P<name>(?:layers\.\d+\.(?:(?:self_attention|mlp)_res_(?:norm|proj)"
    r"|input_layernorm|post_attention_layernorm)|output_attn_res_(?:norm|proj))\.weight)"
)


class SiteWeights:
    """The weights of call sites as one tensor for norms and one for queries, without a second copy of them.

    The parameters become views of these tensors, so that they may be changed in place, as loading a state
    dict does, and a CUDA graph sees it. Whatever gives them other memory, such as a move to another device,
    undoes that; the next use does it again.
    """

    def __init__(self, pairs: list[tuple[_Weight, _Weight]]) -> None:
        self.pairs = pairs
        self.norms: torch.Tensor | None = None
        self.queries: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies, whose parameters have memory of their own."""
        return {"pairs": self.pairs, "norms": None, "queries": None}

    def of(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """``[count, H]`` each, from one site on; and whether kernels right before this wrote them."""
        are_tied = self.are_tied()
        # A graph's inputs may not move while it is traced.
        if are_tied or (not torch.compiler.is_compiling() and self.tie()):
            assert self.norms is not None
            assert self.queries is not None
            return self.norms[first : first + count], self.queries[first : first + count], not are_tied
        pairs = self.pairs[first : first + count]
        norms, queries = zip(*((norm.weight, query.weight.squeeze(0)) for norm, query in pairs), strict=True)
        return torch.stack(norms), torch.stack(queries), True

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def are_tied(self) -> bool:
        """Whether every parameter is such a view."""
        weights = self._weights()
        return all(type(weight) is nn.Parameter for pair in weights for weight in pair) and self._are_views(
            weights
        )

    def tie(self) -> bool:
        """Make every parameter such a view where that may be done; whether they are."""
        if self.are_tied():
            return True
        weights = self._weights()
        flat = [weight for pair in weights for weight in pair]
        if any(type(weight) is not nn.Parameter or weight.is_meta for weight in flat):
            return False
        if len({(weight.dtype, weight.device) for weight in flat}) > 1:
            return False
        if len({weight.is_inference() for weight in flat}) > 1:
            return False
        if flat[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # the views would lie in the graph's memory
        # An inference tensor counts no versions, whatever its memory: only another one may lend it that.
        with torch.inference_mode(flat[0].is_inference()), torch.no_grad():
            self.norms = torch.stack([norm.detach() for norm, _ in weights])
            self.queries = torch.cat([query.detach() for _, query in weights])
            for index, (norm, query) in enumerate(weights):
                norm.data = self.norms[index]
                query.data = self.queries[index : index + 1]
        return True

    def _weights(self) -> list[tuple[Any, Any]]:
        return [(norm._parameters["weight"], query._parameters["weight"]) for norm, query in self.pairs]

    def _are_views(self, weights: list[tuple[Any, Any]]) -> bool:
        if self.norms is None or self.queries is None:
            return False
        size = self.norms.stride(0) * self.norms.element_size()
        norms, queries = self.norms.data_ptr(), self.queries.data_ptr()
        return all(
            norm.data_ptr() == norms + index * size and query.data_ptr() == queries + index * size
            for index, (norm, query) in enumerate(weights)
        )


def _tie_again(stack: Any, keys: Any) -> None:
    """After a state dict was loaded, which may have replaced parameters that a compiled graph reads."""
    del keys
    stack._tie_early()


class _Weight(nn.Module):
    """Holds one weight under a checkpoint's name; no nn.Linear, which quantisers and shards look for."""

    def __init__(self, *shape: int, fill: float, **where: Any) -> None:
        super().__init__()
        self.weight = _weight(*shape, fill=fill, **where)


def _weight(*shape: int, fill: float, **where: Any) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, fill, **where), requires_grad=False)
