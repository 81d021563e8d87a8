"""Starting the process."""

from __future__ import annotations

import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

from moe_runtime.server.config import encode_config


def run(document):
    return subprocess.run(
        [sys.executable, "-m", "moe_runtime.server"],
        input=document,
        capture_output=True,
        timeout=30,
        check=False,
    )


def test_a_taken_port_is_one_message_and_exit_2(make_config):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(encode_config(make_config(port=port)))
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.decode().splitlines() == [
        f"error: cannot listen on 127.0.0.1 port {port}: Address already in use"
    ]


def test_an_unreadable_checkpoint_is_one_message_and_exit_2(make_config, tmp_path):
    config = make_config(model_dir=str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-m", "moe_runtime.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        process.stdin.write(encode_config(config))
        process.stdin.flush()
        assert process.wait(20) == 2
        assert b"tokenizer.json is missing" in process.stderr.read()


def test_no_configuration_is_exit_2():
    for document in (b"", b"{}\n"):
        done = run(document)
        assert done.returncode == 2
        assert b"no server configuration on standard input" in done.stderr


def test_the_process_loads_no_torch(server):
    maps = f"/proc/{server.process.pid}/maps"
    with open(maps) as file:
        assert "libtorch" not in file.read()


def test_the_process_takes_all_the_open_files_it_may_have(make_config):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    command = f"ulimit -S -n 256; exec {sys.executable} -m moe_runtime.server"
    process = subprocess.Popen(
        ["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with process:
        process.stdin.write(encode_config(make_config()))
        process.stdin.flush()
        assert process.stdout.readline()
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        process.stdin.close()
        process.wait(20)
    soft = re.search(r"Max open files +(\S+)", limits).group(1)
    assert soft == ("unlimited" if hard == resource.RLIM_INFINITY else str(hard))
