"""`python -m ddrl_jax.sidecar build | serve | score | bench | train | convert`.

A user's mistake ends in one line and exit code 2.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
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
    p.add_argument("--data", default="", help="what to train on: of digits an .npz of clips or a folder with "
                   "clips.npz, of mini_clip the folder of the emoji packages")  # fmt: skip
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

    p = sub.add_parser("serve", help="run the reward server", argument_default=argparse.SUPPRESS)
    p.add_argument("--config", default="", help="TOML file of what follows, '_' for '-'; flags override it")
    p.add_argument("--scorer", action="append",
                   help="NAME or FILE.py:Class, perhaps with options: NAME,env=own,weights=DIR,device=cuda:1,"
                   "dtype=bfloat16,batch_size=4; may be repeated")  # fmt: skip
    p.add_argument("--weights", help="folder that the scorers load from")
    p.add_argument("--codec", help="identity, unshuffle:factor=N,mean=M,std=S, or wan:path=FILE_OR_FOLDER,tile=N")
    p.add_argument("--text-encoder", help="folder of a Qwen2.5-VL text tower: captions are embedded too")
    p.add_argument("--text-tokenizer", help="folder of its tokenizer, where that is another")
    p.add_argument("--text-length", type=int, help="tokens a caption, filled up or cut (512)")
    p.add_argument("--text-strategy", help="full_concat, mean_pooling or pool_every_N_layers_and_concat")
    p.add_argument("--text-dtype", help="of the tower: bfloat16 or float32")
    p.add_argument("--host", help="127.0.0.1; another address needs a token")
    p.add_argument("--port", type=int, help="0: any free one")
    p.add_argument("--token-env", help="name of the variable that holds the bearer token")
    p.add_argument("--ready-file", help="JSON written here once the server answers")
    p.add_argument("--device", help="cpu, cuda, cuda:1, ...")
    p.add_argument("--threads", type=int, help="of torch (1)")
    p.add_argument("--queue", help="embedded, or redis://HOST:PORT/DB for a fleet")
    p.add_argument("--dead-seconds", type=float, help="a replica silent for so long has its work taken over (15)")
    p.add_argument("--queue-size", type=int, help="most requests waiting (64)")
    p.add_argument("--max-body-mib", type=int, help="largest request (1024)")
    p.add_argument("--grace", type=float, help="seconds a stop may take (30)")
    p.add_argument("--replica-id", help="sent with every answer, for clients that pin to it")
    p.add_argument("--parent-pid", type=int, help="die when this parent does (set by the trainer)")
    p.add_argument("--log-prompts", action="store_true", help="logs hold prompts; otherwise never")
    p.add_argument("--log-level", help="debug, info, warning or error")

    p = sub.add_parser("score", help="rate pictures and videos, into a CSV file")
    p.add_argument("files", nargs="+", metavar="FOLDER|FILE")
    p.add_argument("--scorer", action="append", required=True, help="as of serve; may be repeated")
    p.add_argument("--prompts", default="beside",
                   help="a CSV with columns file and prompt; beside: NAME.txt beside each file; none")  # fmt: skip
    p.add_argument("--out", required=True, help="the CSV to write; '-' is the standard output")
    p.add_argument("--weights", default="", help="folder that the scorers load from")
    p.add_argument("--frames", type=int, default=0, help="of a video, evenly chosen; 0: all")
    p.add_argument("--device", default="cpu")
    p.add_argument("--threads", type=int, default=1)

    p = sub.add_parser("bench", help="throughput and latency of a running server")
    p.add_argument("--url", required=True, help="http://HOST:PORT")
    p.add_argument("--scorer", action="append", default=[], help="default: the first that the server has")
    p.add_argument("--token-env", default="", help="name of the variable that holds the bearer token")
    p.add_argument("--shape", default="4,3,1,64,64", help="of an array sent: B,C,T,H,W; of an image B,H,W,C")
    p.add_argument("--media-type", default="video", choices=("latent", "video", "image"))
    p.add_argument("--requests", type=int, default=100)
    p.add_argument("--concurrency", type=int, default=4)
    p.add_argument("--timeout", type=float, default=120.0, help="seconds until a request counts as lost")
    p.add_argument("--json", default="", help="file for the figures; '-' is the standard output")
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
    modules = {"digits": "digits_training", "mini_clip": "mini_clip_training"}
    if args.scorer not in modules:
        raise ValueError(f"scorer: {args.scorer!r} has no training; {' and '.join(modules)} have")
    training = importlib.import_module(f".scorers.{modules[args.scorer]}", __package__)
    training.main(args.data, args.out, seed=args.seed, threads=args.threads)


def read_token(variable: str) -> str:
    """The token in an environment variable, which is taken out of it; "" without a name. Raises ValueError."""
    token = os.environ.pop(variable, "") if variable else ""
    if variable and not token:
        raise ValueError(f"token-env: the variable {variable} is empty or not set")
    return token


def serve(args: argparse.Namespace) -> None:
    check_modules("digits")
    from . import logs, server, settings

    flags = {name: value for name, value in vars(args).items() if name not in ("command", "config")}
    s = settings.read(args.config, flags)
    if not s.scorer and not s.text_encoder:
        raise ValueError("scorer: none; name one with --scorer, such as digits, or give --text-encoder")
    token = read_token(s.token_env)
    if s.parent_pid:
        server.exit_with_parent(s.parent_pid)
    logs.start(s.log_level, s.log_prompts)
    sock = server.bind(s.host, s.port, token)

    from .codec import parse_codec
    from .protocol import Limits

    codec = parse_codec(s.codec, s.device)

    from .queue import open_queue
    from .scorer_process import open_scorers, set_up_torch
    from .worker import Worker

    set_up_torch(s.threads)
    scorers = open_scorers(s.scorer, s.weights, s.device, s.threads)
    limits = Limits(queue=s.queue_size, body_bytes=s.max_body_mib << 20)
    text = None
    if s.text_encoder:
        from .text import TextEncoder, TextWorker

        encoder = TextEncoder(
            s.text_encoder, tokenizer=s.text_tokenizer, length=s.text_length, strategy=s.text_strategy,
            dtype=s.text_dtype, device=s.device,
        )  # fmt: skip
        text = TextWorker(encoder, limits.queue)
    queue = open_queue(s.queue, limits, scorers, s.codec, s.dead_seconds)  # last: whoever takes work can do it
    server.serve(
        sock, queue, Worker(scorers, codec, limits, queue), limits=limits, token=token,
        ready_file=s.ready_file, replica_id=s.replica_id, grace=s.grace, text=text,
    )  # fmt: skip


def score(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 where some file could not be rated."""
    check_modules("digits")
    from . import score as scoring

    return scoring.main(args)


def bench(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 where some request was lost."""
    check_modules("digits")
    from . import bench as benchmark

    return benchmark.main(args, read_token(args.token_env))


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.command == "build":
            building.build(args.scorer, args.env, args.data, args.out, args.seed, args.threads)
        elif args.command == "train":
            train(args)
        elif args.command == "convert":
            convert.convert(args)
        elif args.command == "serve":
            serve(args)
        else:
            return {"score": score, "bench": bench}[args.command](args)
    except (ValueError, OSError) as error:
        line = " ".join(str(error).split())
        print(f"ddrl_jax.sidecar: {line}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
