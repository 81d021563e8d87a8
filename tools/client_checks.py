"""Runs clients of other projects, unmodified, against a server on two ranks, and judges what they say.

    python -m venv clients && clients/bin/pip install -r requirements/clients.txt
    python tools/client_checks.py --clients clients/bin [schemathesis] [lm-eval] [guidellm]

schemathesis  valid and invalid requests made from the server's own OpenAPI document: no 5xx, no answer that the
              document does not have, and the same bits of a probe before and after
lm-eval       ``local-completions`` on a small task of log-likelihoods: each equals, bit for bit, the offline engine's
guidellm      a short load: no request fails, and every one gets as many tokens as it asked for

OpenAI's own client is tested by tests/e2e/test_openai_client.py. Nothing is downloaded: task, data and tokenizer are
local. Exit code 0 where all checks pass.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_runtime.engine.llm import LLM  # noqa: E402
from moe_runtime.engine.request import SamplingParams  # noqa: E402
from moe_runtime.engine.tokenizer import Tokenizer  # noqa: E402
from tests.servers import RunningServer, running_server  # noqa: E402

BUILTIN = ROOT / "moe_runtime" / "builtin"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "OPENAI_API_KEY": "none",
}
SCHEMATHESIS_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
PAIRS = (
    ("HAMLET\nTo be, or not to be", ": that is the question"),
    ("JULIET\nO Romeo, Romeo!", " wherefore art thou Romeo?"),
    ("MACBETH\nIs this a dagger", " which I see before me"),
    ("PUCK\nLord, what", " fools these mortals be!"),
    ("A", " b"),
    ("Emoji \U0001f469\u200d\U0001f680 and", " \u6625\u306e\u6d77 caf\u00e9"),
    ("The", " the" * 60),
)
NUM_LOAD_REQUESTS = 24
NUM_LOAD_TOKENS = 16


def main() -> int:
    """Run the checks asked for, all of them by default."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", nargs="*", help="schemathesis, lm-eval, guidellm; by default all")
    parser.add_argument("--clients", type=Path, required=True, help="bin folder with the clients' commands")
    parser.add_argument("--max-examples", type=int, default=50, help="schemathesis' examples per operation")
    options = parser.parse_args()
    checks: dict[str, Callable[[Path, argparse.Namespace], str]] = {
        "schemathesis": check_schemathesis,
        "lm-eval": check_lm_eval,
        "guidellm": check_guidellm,
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended
    unknown = set(options.checks) - set(checks)
    if unknown:
        parser.error(f"checks ({sorted(unknown)[0]}) must be of {', '.join(checks)}")
    failed = 0
    for name in options.checks or checks:
        with tempfile.TemporaryDirectory(prefix="client-checks-") as folder:
            try:
                print(f"{name}: {checks[name](Path(folder), options)}", flush=True)
            except (AssertionError, subprocess.SubprocessError) as error:
                failed += 1
                print(f"{name}: FAILED: {error}", flush=True)
    return 1 if failed else 0


def run_client(options: argparse.Namespace, folder: Path, *command: str, timeout_s: float = 900) -> str:
    """Output of a client's command, which must succeed."""
    program = options.clients.absolute() / command[0]
    done = subprocess.run(
        [program, *command[1:]],
        cwd=folder,
        env=os.environ | ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout


def probe(server: RunningServer) -> str:
    """What must not change."""
    answer = server.complete(prompt=PAIRS[0][0], max_tokens=12, seed=5, logprobs=5)
    return json.dumps(answer["choices"])


def check_schemathesis(folder: Path, options: argparse.Namespace) -> str:
    """Bounded by ``--max-examples``; the context is short, so that valid requests are."""
    with running_server(2, "--max-model-len", "64") as server:
        before = probe(server)
        pids = [rank["pid"] for rank in server.info()["ranks"]]
        output = run_client(
            options,
            folder,
            *("st", "run", f"{server.url}/openapi.json", "--phases", "coverage,fuzzing", "--no-color"),
            *("--max-examples", str(options.max_examples), "--seed", "1", "--request-timeout", "120"),
            *("--checks", ",".join(SCHEMATHESIS_CHECKS)),
        )
        assert probe(server) == before, "the probe has other bits than before"
        assert [rank["pid"] for rank in server.info()["ranks"]] == pids, "a rank has been replaced"
        assert server.info()["num_open_requests"] == 0, "requests are left behind"
        assert "Traceback" not in server.text, server.text[-4000:]
    return next(line.strip() for line in output.splitlines() if "generated" in line)


def check_lm_eval(folder: Path, options: argparse.Namespace) -> str:
    """Contexts and continuations from a local file, through ``echo`` and ``logprobs``."""
    data = folder / "pairs.jsonl"
    data.write_text("".join([json.dumps({"context": c, "target": t}) + "\n" for c, t in PAIRS]))
    task = {
        "task": "pairs",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{target}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
    }
    (folder / "pairs.yaml").write_text(json.dumps(task))  # YAML holds JSON
    with running_server(2) as server:
        model = {
            "model": "builtin",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(BUILTIN),
            "tokenizer_backend": "huggingface",
            "num_concurrent": 4,
            "max_length": 1024,
        }
        arguments = ",".join([f"{name}={value}" for name, value in model.items()])
        run_client(
            options,
            folder,
            *(
                "lm_eval",
                "run",
                "--model",
                "local-completions",
                "--model_args",
                arguments,
                "--tasks",
                "pairs",
            ),
            *("--include_path", str(folder), "--output_path", "out", "--log_samples"),
        )
    [samples] = (folder / "out").rglob("samples_pairs_*.jsonl")
    found = {}
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        [[value]] = sample["resps"]
        found[sample["doc"]["context"]] = (float(value[0]), str(value[1]) == "True")
    expected = offline_loglikelihoods()
    assert found == expected, f"lm-eval has {found}, the offline engine {expected}"
    return f"{len(found)} log-likelihoods equal the offline engine's"


def offline_loglikelihoods() -> dict[str, tuple[float, bool]]:
    """Sum of the continuation's logprobs, and whether it is the greedy one, by context."""
    tokenizer = Tokenizer.from_dir(BUILTIN)
    prompts, starts = [], []
    for context, target in PAIRS:
        spaces = len(context) - len(context.rstrip())
        assert not spaces, "lm-eval would move them to the target"
        prompts.append(tokenizer.encode(context + target, add_special_tokens=False))
        starts.append(len(tokenizer.encode(context, add_special_tokens=False)))
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    expected = {}
    for (context, _), start, result in zip(PAIRS, starts, LLM().generate(prompts, params), strict=True):
        assert result.prompt_logprobs is not None, "they were asked for"
        pairs = list(zip(result.prompt_ids, result.prompt_logprobs, strict=True))[start:]
        total = sum(entry.logprob for _, entry in pairs if entry is not None)
        is_greedy = all(entry is not None and entry.top_ids[0] == token_id for token_id, entry in pairs)
        expected[context] = (total, is_greedy)
    return expected


def check_guidellm(folder: Path, options: argparse.Namespace) -> str:
    """Synthetic prompts of 32 tokens, four streams at once."""
    with running_server(2) as server:
        run_client(
            options,
            folder,
            *("guidellm", "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={server.url},model=builtin"),
            *("--profile", "kind=concurrent,streams=4"),
            *("--constraint", f"kind=max_requests,count={NUM_LOAD_REQUESTS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={BUILTIN}"),
            *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_LOAD_TOKENS}"),
            *("--output", f"kind=json,path={folder / 'report.json'}"),
        )
        assert server.info()["num_open_requests"] == 0, "requests are left behind"
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    [benchmark] = report["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"], requests["errored"][0]
    assert len(requests["successful"]) == NUM_LOAD_REQUESTS, f"{len(requests['successful'])} requests"
    tokens = {request["output_tokens"] for request in requests["successful"]}
    assert tokens == {NUM_LOAD_TOKENS}, f"answers have {sorted(tokens)} tokens"
    return f"{NUM_LOAD_REQUESTS} requests"


if __name__ == "__main__":
    sys.exit(main())
