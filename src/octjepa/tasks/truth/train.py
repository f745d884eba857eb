"""Continues an encoder on the truth of randomised phantoms: `python -m octjepa.tasks.truth.train --out FOLDER`.

FOLDER/encoder holds the result for `octjepa.load_encoder`. The same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from octjepa.config import science_hash
from octjepa.distributed.runtime import Runtime
from octjepa.distributed.signals import Interrupted
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.export import export_encoder
from octjepa.errors import OctjepaError
from octjepa.files import write_json
from octjepa.tasks.truth.network import TruthNetwork
from octjepa.tasks.truth.training import TruthSettings, train_on_truth


def main() -> int:
    """Reads the command line and trains; the exit code is 0, 1 after an error, or 128 plus the number of a signal."""
    parser = argparse.ArgumentParser(prog="python -m octjepa.tasks.truth.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints, metrics and the encoder")
    parser.add_argument("--init", default="phantom-tiny", help="encoder to start from: a name, a run or a folder")
    parser.add_argument("--random", action="store_true", help="start from random weights of the same architecture")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--uses", type=int, default=4, help="how often a volume is used, with new crops and tokens")
    parser.add_argument("--keep", type=float, default=0.0, help="weight of the tokens of the encoder before training")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--licence", help="of the weights, as the Hugging Face Hub names it; for the card")
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16", "auto"))
    arguments = parser.parse_args()
    try:
        torch.manual_seed(arguments.seed)
        encoder = load_encoder(arguments.init)
        if arguments.random:
            encoder = encoder.untrained()
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
        # A run that has not ended may be made longer or shorter when it is resumed.
        settled = [
            {**asdict(settings), "updates": None},
            science_hash(encoder.recipe),
            str(arguments.init),
            arguments.random,
        ]
        fingerprint = hashlib.sha256(json.dumps(settled).encode()).hexdigest()[:16]
        train_on_truth(network, encoder.recipe, settings, runtime, arguments.out, fingerprint)
        recipe = encoder.recipe.model_copy(update={"name": "truth"})
        trained = PretrainedEncoder(network.encoder.cpu(), recipe, "truth", encoder.recorded_training, encoder.which)
        export_encoder(trained, "safetensors", arguments.out / "encoder", licence=arguments.licence)
    except Interrupted as error:
        print(f"{error}", file=sys.stderr)
        return error.exit_code
    except OctjepaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
