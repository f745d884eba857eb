"""Trains an encoder on the truth of randomised phantoms: `python -m octjepa.tasks.truth.train --out FOLDER`.

FOLDER/encoder holds the result for `octjepa.load_encoder`. The same command resumes an interrupted run. With `--with
mae --store STORE` every update also learns an objective of pretraining from a batch of volumes without labels.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from octjepa.distributed.runtime import Runtime
from octjepa.encoders import PretrainedEncoder
from octjepa.encoders.export import export_encoder
from octjepa.errors import UsageError
from octjepa.files import write_json
from octjepa.store import Store
from octjepa.tasks.encoder_command import (
    add_training_options,
    exit_code_of,
    recorded_volumes,
    run_fingerprint,
    starting_encoder,
)
from octjepa.tasks.truth.network import TruthNetwork
from octjepa.tasks.truth.training import TruthSettings, train_on_truth
from octjepa.tasks.truth.unlabelled import Unlabelled, unlabelled_recipe


def main() -> int:
    """Reads the command line and trains; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m octjepa.tasks.truth.train", description=__doc__)
    add_training_options(parser, batch=16)
    parser.add_argument("--uses", type=int, default=4, help="how often a volume is used, with new crops and tokens")
    parser.add_argument("--keep", type=float, default=0.0, help="weight of the tokens of the encoder before training")
    parser.add_argument("--licence", help="of the weights, as the Hugging Face Hub names it; for the card")
    second = parser.add_argument_group("a second loss, on volumes without labels")
    second.add_argument("--with", dest="objective", metavar="OBJECTIVE", help="mae, vjepa or another objective")
    second.add_argument("--store", type=Path, help="the volumes, made with the encoder's preprocessing")
    second.add_argument("--weight", type=float, help="of this loss (default: 1); that of the truth is 1")
    second.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of its recipe, such as masks.ratio=0.75")
    arguments = parser.parse_args()
    return exit_code_of(partial(_train, arguments), arguments.out)


def _train(arguments: argparse.Namespace) -> None:
    encoder = starting_encoder(arguments)
    settings = TruthSettings(
        updates=arguments.updates,
        batch=arguments.batch,
        uses=arguments.uses,
        keep=arguments.keep,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
    )
    unlabelled = _unlabelled(encoder, settings, arguments)
    runtime = Runtime(arguments.precision)
    encoder.network.requires_grad_(True).train()
    network = TruthNetwork(encoder.network, encoder.recipe.tokens.patch_size).to(runtime.device)
    others = [encoder.weights_hash(), runtime.precision]
    if unlabelled is not None:
        others.append(unlabelled.fingerprint)
    fingerprint = run_fingerprint(asdict(settings), encoder, arguments, *others)
    train_on_truth(network, encoder.recipe, settings, runtime, arguments.out, fingerprint, unlabelled)
    write_json(arguments.out / "settings.json", asdict(settings))  # a refused run leaves those of the run before
    recipe = encoder.recipe.model_copy(update={"name": "truth"})
    seen = encoder.recorded_training
    if unlabelled is not None:
        seen |= recorded_volumes(unlabelled.store, unlabelled.volume_ids)
    trained = PretrainedEncoder(network.encoder.cpu(), recipe, "truth", seen, encoder.which)
    export_encoder(trained, "safetensors", arguments.out / "encoder", licence=arguments.licence)


def _unlabelled(
    encoder: PretrainedEncoder, settings: TruthSettings, arguments: argparse.Namespace
) -> Unlabelled | None:
    """The second loss, if there is one. Raises UsageError: only a part of its options is there."""
    if arguments.objective is None:
        values = {"--store": arguments.store, "--weight": arguments.weight}
        if options := [*(option for option, value in values.items() if value is not None), *arguments.overrides]:
            option = options[0]
            raise UsageError(f"{option} belongs to a second loss, and none is named: add --with mae, for example")
        return None
    recipe = unlabelled_recipe(encoder.recipe, arguments.objective, settings.batch, arguments.overrides, settings.seed)
    if arguments.store is None:
        raise UsageError(f"--with {arguments.objective} learns from volumes without labels: add --store STORE")
    weight = 1.0 if arguments.weight is None else arguments.weight
    return Unlabelled(recipe, Store.open(arguments.store), encoder.network, weight)


if __name__ == "__main__":
    sys.exit(main())
