"""The container files hold to the linters' rules, and to ours: no root, nothing open to the network, health known."""

from __future__ import annotations

import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPOSE = ROOT / "docker" / "compose.yaml"
SCRIPTS = Path(sysconfig.get_path("scripts"))


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order: name and arguments, continued lines joined, comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (name, " ".join(rest.split()))
        for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def arguments(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


@pytest.fixture(scope="module")
def compose() -> dict:
    return YAML(typ="safe").load(COMPOSE)


def check(*command: object) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dockerfile_passes_its_linter():
    check(SCRIPTS / "hadolint", "--no-color", DOCKERFILE)


def test_the_linter_is_alive(tmp_path):
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python\nRUN cd /tmp\n")
    done = subprocess.run([SCRIPTS / "hadolint", bad], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert {"DL3006", "DL3003"} <= set(re.findall(r"DL\d+", done.stdout))


def test_compose_file_passes_its_schema():
    check(SCRIPTS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)


def test_worker_does_not_run_as_root():
    names = [name for name, _ in instructions()]
    last_stage = instructions()[len(names) - 1 - names[::-1].index("FROM") :]
    users = [rest for name, rest in last_stage if name == "USER"]
    assert users == ["10001:10001"]
    # Nothing is copied, run or started as root after it.
    after = [name for name, _ in last_stage][[name for name, _ in last_stage].index("USER") + 1 :]
    assert after == ["STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"]


def test_image_installs_the_locked_packages_only():
    installs = [
        part for run in arguments("RUN") for part in run.split("&&") if "pip install" in part or "pip wheel" in part
    ]
    assert len(installs) == 4
    for part in installs:
        assert (
            "--require-hashes --no-deps -r requirements/" in part
            or "--no-deps --no-index /tmp/wheel" in part
            or ("pip wheel --no-deps --no-build-isolation" in part)
        )


def test_image_copies_what_exists_and_the_build_context_has_it():
    ignored = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    for copied in arguments("COPY"):
        if copied.startswith("--from="):
            continue
        for source in copied.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] in kept, source


def test_image_copies_every_folder_of_the_package():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    copied = {source for line in arguments("COPY") for source in line.split()[:-1]}
    assert set(setup["package-dir"].values()) <= copied


def test_image_knows_its_health():
    (health,) = arguments("HEALTHCHECK")
    assert health.endswith('CMD ["keepstep", "doctor", "--json"]')
    assert arguments("ENTRYPOINT") == ['["keepstep"]']


def test_both_stages_stand_on_the_same_pinned_base():
    images = [line.split(" AS ")[0] for line in arguments("FROM")]
    assert len(set(images)) == 1
    assert re.fullmatch(r"python:3\.\d+-slim-[a-z]+", images[0])


def test_ports_are_open_on_loopback_only(compose):
    ports = {name: service.get("ports", []) for name, service in compose["services"].items()}
    assert {name for name, opened in ports.items() if opened} == {"postgresql", "redis"}
    assert all(port.startswith("127.0.0.1:") for opened in ports.values() for port in opened)


def test_servers_keep_their_data_and_tell_their_health(compose):
    for name in ("postgresql", "redis"):
        service = compose["services"][name]
        assert service["healthcheck"]["test"][0] == "CMD", name
        (volume,) = service["volumes"]
        assert volume.split(":")[0] in compose["volumes"], name


def test_workers_start_after_the_schema_is_there(compose):
    services = compose["services"]
    assert services["worker"]["depends_on"] == {
        "migrate": {"condition": "service_completed_successfully"},
        "redis": {"condition": "service_healthy"},
    }
    assert services["migrate"]["depends_on"] == {"postgresql": {"condition": "service_healthy"}}


def test_workers_hold_no_privileges(compose):
    for name in ("worker", "migrate"):
        service = compose["services"][name]
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_no_password_stands_in_a_file(compose):
    assert compose["services"]["postgresql"]["environment"]["POSTGRES_PASSWORD"].startswith("${POSTGRES_PASSWORD:?")
    assert "${POSTGRES_PASSWORD:?" in compose["services"]["worker"]["environment"]["KEEPSTEP_DATABASE"]


def test_workers_are_set_up_by_settings_that_exist(compose):
    from keepstep.settings import Settings

    known = {f"KEEPSTEP_{name.upper()}" for name in Settings.model_fields}
    for name in ("worker", "migrate"):
        assert set(compose["services"][name]["environment"]) <= known
