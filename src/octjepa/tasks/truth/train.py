"""Continues an encoder on the truth of randomised phantoms: `python -m octjepa.tasks.truth.train --out FOLDER`.

FOLDER/encoder holds the result for `octjepa.load_encoder`. The same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import partial

from octjepa.distributed.runtime import Runtime
from octjepa.encoders import PretrainedEncoder
from octjepa.encoders.export import export_encoder
from octjepa.files import write_json
from octjepa.tasks.encoder_command import add_training_options, exit_code_of, run_fingerprint, starting_encoder
from octjepa.tasks.truth.network import TruthNetwork
from octjepa.tasks.truth.training import TruthSettings, train_on_truth


def main() -> int:
    """Reads the command line and trains; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m octjepa.tasks.truth.train", description=__doc__)
    add_training_options(parser, batch=16, precision="bf16")
    parser.add_argument("--uses", type=int, default=4, help="how often a volume is used, with new crops and tokens")
    parser.add_argument("--keep", type=float, default=0.0, help="weight of the tokens of the encoder before training")
    parser.add_argument("--licence", help="of the weights, as the Hugging Face Hub names it; for the card")
    return exit_code_of(partial(_train, parser.parse_args()))


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
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / "settings.json", asdict(settings))
    runtime = Runtime(arguments.precision)
    encoder.network.requires_grad_(True).train()
    network = TruthNetwork(encoder.network, encoder.recipe.tokens.patch_size).to(runtime.device)
    fingerprint = run_fingerprint(asdict(settings), encoder, arguments)
    train_on_truth(network, encoder.recipe, settings, runtime, arguments.out, fingerprint)
    recipe = encoder.recipe.model_copy(update={"name": "truth"})
    trained = PretrainedEncoder(network.encoder.cpu(), recipe, "truth", encoder.recorded_training, encoder.which)
    export_encoder(trained, "safetensors", arguments.out / "encoder", licence=arguments.licence)


if __name__ == "__main__":
    sys.exit(main())
