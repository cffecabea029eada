"""`python -m ddrl_jax.sidecar build | serve | train | convert`. A user's mistake ends in one line and exit code 2."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys

from . import build as building
from . import convert


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m ddrl_jax.sidecar", allow_abbrev=False)
    sub = top.add_subparsers(dest="command", required=True)

    p = sub.add_parser("build", help="make a scorer's environment; with --data also train its weights")
    p.add_argument("--scorer", default="digits")
    p.add_argument("--env", default="", help="folder of the virtual environment (default "
                   "~/.cache/ddrl_jax/sidecar/SCORER); 'this' uses the running interpreter")  # fmt: skip
    p.add_argument("--data", default="", help="clips to train on: an .npz, or a folder with clips.npz")
    p.add_argument("--out", default="", help="folder for the weights")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=1)

    p = sub.add_parser("train", help="train a scorer's weights in this environment")
    p.add_argument("--scorer", default="digits")
    p.add_argument("--data", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=1)

    convert.add_arguments(sub.add_parser("convert", help="a torch file as safetensors, or the reverse"))

    p = sub.add_parser("serve", help="run the reward server")
    p.add_argument("--scorer", action="append", default=[],
                   help="digits, brightness or FILE.py:Class; may be repeated")  # fmt: skip
    p.add_argument("--weights", default="", help="folder that the scorers load from")
    p.add_argument("--codec", default="identity",
                   help="identity, unshuffle:factor=N,mean=M,std=S, or wan:path=FILE_OR_FOLDER,tile=N")  # fmt: skip
    p.add_argument("--text-encoder", default="", help="folder of a Qwen2.5-VL text tower: captions are embedded too")
    p.add_argument("--text-tokenizer", default="", help="folder of its tokenizer, where that is another")
    p.add_argument("--text-length", type=int, default=512, help="tokens a caption, filled up or cut")
    p.add_argument("--text-strategy", default="full_concat",
                   help="full_concat, mean_pooling or pool_every_N_layers_and_concat")  # fmt: skip
    p.add_argument("--text-dtype", default="bfloat16", help="of the tower: bfloat16 or float32")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=0, help="0: any free one")
    p.add_argument("--token-env", default="", help="name of the variable that holds the bearer token")
    p.add_argument("--ready-file", default="", help="JSON written here once the server answers")
    p.add_argument("--device", default="cpu")
    p.add_argument("--threads", type=int, default=1, help="of torch")
    p.add_argument("--queue", type=int, default=64, help="most requests waiting")
    p.add_argument("--max-body-mib", type=int, default=1024)
    p.add_argument("--grace", type=float, default=30.0, help="seconds a stop may take")
    p.add_argument("--replica-id", default="")
    p.add_argument("--parent-pid", type=int, default=0, help="die when this parent does (set by the trainer)")
    return top


def check_modules(scorer: str) -> None:
    """Raises ValueError when this environment lacks what the server is made of."""
    missing = [name for name in building.MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the sidecar's environment {sys.prefix} lacks {', '.join(missing)}; complete it with: "
            + building.build_command(scorer, sys.prefix)
        )


def train(args: argparse.Namespace) -> None:
    check_modules(args.scorer)
    if args.scorer != "digits":
        raise ValueError(f"scorer: {args.scorer!r} has no training; only digits has")
    from .scorers import digits_training

    digits_training.main(args.data, args.out, seed=args.seed, threads=args.threads)


def serve(args: argparse.Namespace) -> None:
    for name, least in (("threads", 1), ("queue", 1), ("max_body_mib", 1), ("grace", 0)):
        if not getattr(args, name) >= least:
            raise ValueError(f"{name.replace('_', '-')}: {getattr(args, name)}; must be at least {least}")
    if not args.scorer and not args.text_encoder:
        raise ValueError("scorer: none; name one with --scorer, such as digits, or give --text-encoder")
    token = ""
    if args.token_env:
        token = os.environ.pop(args.token_env, "")
        if not token:
            raise ValueError(f"token_env: the variable {args.token_env} is empty or not set")
    check_modules("digits")
    from . import server

    if args.parent_pid:
        server.exit_with_parent(args.parent_pid)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")
    sock = server.bind(args.host, args.port, token)

    from .codec import parse_codec
    from .protocol import Limits
    from .scorers import load

    codec = parse_codec(args.codec, args.device)

    import torch

    from .worker import Worker

    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    scorers = {}
    for spec in args.scorer:
        name, scorer = load(spec, args.weights or None, args.device)
        if name in scorers:
            raise ValueError(f"scorer: two are named {name!r}")
        scorers[name] = scorer
    limits = Limits(queue=args.queue, body_bytes=args.max_body_mib << 20)
    text = None
    if args.text_encoder:
        from .text import TextEncoder, TextWorker

        encoder = TextEncoder(
            args.text_encoder, tokenizer=args.text_tokenizer, length=args.text_length, strategy=args.text_strategy,
            dtype=args.text_dtype, device=args.device,
        )  # fmt: skip
        text = TextWorker(encoder, limits.queue)
    server.serve(
        sock, Worker(scorers, codec, limits), limits=limits, token=token,
        ready_file=args.ready_file, replica_id=args.replica_id, grace=args.grace, text=text,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.command == "build":
            building.build(args.scorer, args.env, args.data, args.out, args.seed, args.threads)
        elif args.command == "train":
            train(args)
        elif args.command == "convert":
            convert.convert(args)
        else:
            serve(args)
    except (ValueError, OSError) as error:
        line = " ".join(str(error).split())
        print(f"ddrl_jax.sidecar: {line}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
