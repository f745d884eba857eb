"""Low-rank adapters (LoRA, Hu et al. 2022) in the encoder that is tuned, from the library peft.

In: an encoder and the section `lora` of the recipe. `add_adapters` puts a pair of small matrices next to the chosen
linear layers, in place: the encoder stays the object that it was, and only the adapters learn. `Adapters.merge` adds
their product to the weights after tuning. Out comes the encoder's own architecture, so that whatever reads a tuned
encoder needs neither peft nor code for adapters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from octjepa.errors import UsageError, install_command
from octjepa.tasks.finetune.recipe import Lora
from octjepa.train.learner import network_blocks

_SHOWN_LAYERS = 12  # names in a message


@dataclass(frozen=True)
class Adapters:
    """The adapters in an encoder. layers: each adapted layer by its name; tuner: peft's object that merges them."""

    layers: dict[str, nn.Module]
    tuner: Any

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the adapters, which learn."""
        return [
            value for layer in self.layers.values() for name, value in layer.named_parameters() if _is_adapter(name)
        ]

    def require_calls(self, compute: Callable[[], object]) -> None:
        """Raises UsageError if the encoder's forward pass, which `compute` runs, does not call an adapted layer.

        A layer whose weights are used without calling it (fused attention, `F.linear(x, layer.weight)`) would leave
        its adapter out of the computation, without any error.
        """
        called: set[str] = set()
        hooks = [
            layer.register_forward_hook(lambda *_, name=name: called.add(name)) for name, layer in self.layers.items()
        ]
        try:
            compute()
        finally:
            for hook in hooks:
                hook.remove()
        if unused := [name for name in self.layers if name not in called]:
            raise UsageError(
                f"lora: the encoder uses {len(unused)} of {len(self.layers)} adapted layers without calling them, so "
                f"that adapters cannot learn there: {_listed(unused)}. Name other layers in lora.targets"
            )

    def merge(self) -> None:
        """Adds the adapters to the weights and removes them. Raises UsageError: merged weights are not finite."""
        try:
            self.tuner.merge_and_unload(safe_merge=True)
        except ValueError as error:
            raise UsageError(f"lora: the adapters cannot be merged ({error}): lower encoder_lr or lora.alpha") from None
        vars(self.tuner.model).pop("peft_config", None)


def require_peft() -> Any:
    """The library peft. Raises UsageError if it is not installed."""
    try:
        import peft
    except ImportError:
        raise UsageError(f"lora.rank needs peft: {install_command('lora')}") from None
    return peft


def check_layers(encoder: nn.Module, lora: Lora, compute: Callable[[], object]) -> None:
    """Raises UsageError where `add_adapters` would, or `compute`, a forward pass, does not call a layer to adapt.

    It changes nothing, so that a run with a typing error in lora.targets ends before its folder is begun.
    """
    modules = dict(encoder.named_modules())
    Adapters({name: modules[name] for name in _target_layers(encoder, lora.targets)}, None).require_calls(compute)


def add_adapters(encoder: nn.Module, lora: Lora, seed: int) -> Adapters:
    """Adds adapters to the linear layers that `lora.targets` names, or to all in the encoder's blocks, in place.

    They start at a product of zero: the encoder computes what it computed before. All other weights are frozen.
    Raises UsageError: peft is absent, or the encoder has no such layer.
    """
    peft = require_peft()
    names = _target_layers(encoder, lora.targets)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules="|".join(map(re.escape, names)),  # peft takes a text as a pattern of the whole name
        lora_dropout=0.0,  # dropout would need a random state, which a resume would have to restore
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the same start on every rank and after a resume; peft draws on the CPU
        tuner = peft.LoraModel(encoder, config, "default")
    modules = dict(encoder.named_modules())
    return Adapters({name: modules[name] for name in names}, tuner)


def _target_layers(encoder: nn.Module, targets: tuple[str, ...]) -> list[str]:
    """Names of the linear layers to adapt. Raises UsageError: there is none, or a target names none."""
    # Exactly nn.Linear: a subclass, as in nn.MultiheadAttention, is mostly used without being called.
    linear = [name for name, module in encoder.named_modules() if type(module) is nn.Linear]
    if not targets:
        in_blocks = {module for block in network_blocks(encoder) for module in block.modules()}
        names = [name for name, module in encoder.named_modules() if module in in_blocks and name in linear]
        if not names:
            raise UsageError("lora: the encoder has no linear layer in its blocks: tune it without lora.rank")
        return names
    for target in targets:
        if not any(_ends_with(name, target) for name in linear):
            endings = list(dict.fromkeys(re.sub(r"^.*?\d+\.", "", name) for name in linear))
            raise UsageError(
                f"lora.targets: the encoder has no linear layer {target!r}. "
                + (f"It has {_listed(endings)}" if endings else "It has none: tune it without lora.rank")
            )
    return [name for name in linear if any(_ends_with(name, target) for target in targets)]


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _is_adapter(name: str) -> bool:
    return name.startswith("lora_")


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN_LAYERS
    return ", ".join(names[:_SHOWN_LAYERS]) + (f" and {more} more" if more > 0 else "")
