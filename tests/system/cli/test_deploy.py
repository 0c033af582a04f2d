"""The files of deploy/: their commands exist, their manifests are valid, and what they start drains as they say."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import cli_jobs
import jsonschema
import kubernetes_validate
import pytest
import yaml
from custom_resources import schema_of

import headgate
from headgate.certs import check_certificates, make_certificates
from headgate.cli.main import command_parser
from headgate.tasks.names import unregister
from headgate.workers import WorkerView
from tests.postgres_server import postgres_dsn, postgres_server
from tests.support.cli.support import HERE, PATIENCE, Worker, command, environment, until, worker

__all__ = ["postgres_dsn", "postgres_server"]

DEPLOY = Path(__file__).parents[3] / "deploy"
PORT, METRICS = 7070, 9464
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
OLDEST, NEWEST = "1.27.0", "1.37.0"
"""Releases of Kubernetes against whose schemas the manifests are checked."""


def files() -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in sorted(DEPLOY.rglob("*")) if path.is_file()}


def commands() -> list[tuple[str, list[str]]]:
    """Each command of headgate in these files, with the name of the file."""
    found: list[tuple[str, list[str]]] = []
    for name, text in files().items():
        found += [(name, json.loads(words)) for words in re.findall(r'\["headgate".*?\]', text)]
        unit = re.findall(r"^ExecStart=\S+/headgate (.*)$", text, re.MULTILINE)
        found += [(name, ["headgate", *shlex.split(line)]) for line in unit]
        script = re.findall(r"^srun (headgate .*?)> ", text.replace("\\\n", ""), re.MULTILINE)
        found += [(name, shlex.split(line.replace("$(hostname)", "node-1"))) for line in script]
        said = re.findall(r"`(headgate [a-z]+ [^`]*)`", text)
        found += [(name, shlex.split(line)) for line in said]
    return found


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text("utf-8")) if one is not None]


def document(name: str, kind: str) -> dict[str, Any]:
    [found] = (one for one in documents(DEPLOY / "kubernetes" / name) if one["kind"] == kind)
    return found


def entry_point() -> list[str]:
    [entry] = re.findall(r"^ENTRYPOINT (\[.*\])$", files()["Dockerfile"], re.MULTILINE)
    return list(json.loads(entry))


# -- commands ---------------------------------------------------------------------------------------------------------


def test_p04_every_command_of_the_files_can_be_parsed() -> None:
    found = commands()
    named = {"Dockerfile", "headgate-worker@.service", "workers.sbatch"}
    assert named <= {name for name, _ in found}
    assert "\nType=notify\n" in files()["headgate-worker@.service"]
    for _, (program, name, *arguments) in found:
        assert program == "headgate"
        given = [argument for argument in arguments if argument != "$OPTIONS"]
        assert command_parser(name).parse_args(given)


def test_p04_arguments_of_the_deployment_go_with_the_entry_point_of_the_image() -> None:
    [container] = document("workers.yaml", "Deployment")["spec"]["template"]["spec"]["containers"]
    _, name, *arguments = [*entry_point(), *container["args"]]
    options = command_parser(name).parse_args(arguments)
    assert options.bind == ("0.0.0.0", PORT)
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"grpc": PORT, "metrics": METRICS}
    assert (options.metrics_host, options.metrics_port) == ("0.0.0.0", METRICS)
    assert [port["port"] for port in document("workers.yaml", "Service")["spec"]["ports"]] == [PORT]
    calls, scrapes = document("network-policy.yaml", "NetworkPolicy")["spec"]["ingress"]
    assert [port["port"] for port in calls["ports"]] == [PORT]
    assert [port["port"] for port in scrapes["ports"]] == [METRICS]
    assert {"headgate-client", "app"} == {label for one in calls["from"] for label in one["podSelector"]["matchLabels"]}
    assert options.cert_dir == container["volumeMounts"][0]["mountPath"]


def test_p04_the_grace_period_is_longer_than_what_calls_are_given() -> None:
    pod = document("workers.yaml", "Deployment")["spec"]["template"]["spec"]
    options = command_parser("worker").parse_args(pod["containers"][0]["args"])
    assert options.grace is not None
    assert pod["terminationGracePeriodSeconds"] >= options.grace + 10
    script = files()["workers.sbatch"]
    [grace] = re.findall(r"--grace (\d+)", script)
    [warning] = re.findall(r"--signal=TERM@(\d+)", script)
    assert int(warning) >= int(grace) + 10


def test_c01_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    unit = tmp_path / "headgate-worker@test.service"
    text = files()["headgate-worker@.service"]
    unit.write_text(text.replace("/srv/headgate/venv/bin/headgate", "/bin/true"), "utf-8")
    ran = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


# -- manifests --------------------------------------------------------------------------------------------------------


def problem_of(found: dict[str, Any], version: str) -> str:
    """What the schema says against a manifest; "": nothing."""
    schema = schema_of(found["apiVersion"], found["kind"])
    try:
        if schema is not None:
            jsonschema.validate(found, schema)
        else:
            kubernetes_validate.validate(found, version, strict=True)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        return str(error.message)
    return ""


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_p04_manifests_follow_the_public_schemas(path: Path, version: str) -> None:
    found = documents(path)
    assert found
    assert [problem_of(one, version) for one in found] == [""] * len(found)


def test_p04_all_kinds_of_manifests_are_there() -> None:
    kinds = sorted({one["kind"] for path in MANIFESTS for one in documents(path)})
    wanted = [
        "Certificate",
        "Deployment",
        "Issuer",
        "NetworkPolicy",
        "ScaledObject",
        "Service",
        "TriggerAuthentication",
    ]
    assert kinds == wanted


@pytest.mark.parametrize(
    ("name", "kind", "spoil", "says"),
    [
        ("workers.yaml", "Deployment", lambda spec: spec.update(replica=3), "'replica' was unexpected"),
        ("workers.yaml", "Service", lambda spec: spec["ports"][0].update(port="grpc"), "'grpc' is not of type"),
        ("network-policy.yaml", "NetworkPolicy", lambda spec: spec.update(pods={}), "'pods' was unexpected"),
        (
            "autoscaling.yaml",
            "ScaledObject",
            lambda spec: spec["triggers"][0]["metadata"].update(targetQueryValue=20),
            "20 is not of type 'string'",
        ),
        ("autoscaling.yaml", "ScaledObject", lambda spec: spec.pop("scaleTargetRef"), "'scaleTargetRef' is a required"),
        ("autoscaling.yaml", "TriggerAuthentication", lambda spec: spec.update(secret=1), "'secret' was unexpected"),
    ],
)
def test_p04_a_fault_in_a_manifest_is_found(name: str, kind: str, spoil: Callable[[Any], object], says: str) -> None:
    found = document(name, kind)
    spoil(found["spec"])
    assert says in problem_of(found, NEWEST)


def test_p04_the_manifests_name_each_other_rightly() -> None:
    deployment, service = document("workers.yaml", "Deployment"), document("workers.yaml", "Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    assert document("network-policy.yaml", "NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    assert service["spec"]["clusterIP"] == "None", "headless: its name has the addresses of all pods"
    scaled = document("autoscaling.yaml", "ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    trust = document("autoscaling.yaml", "TriggerAuthentication")["metadata"]["name"]
    assert scaled["triggers"][0]["authenticationRef"]["name"] == trust
    [secret] = (volume["secret"] for volume in deployment["spec"]["template"]["spec"]["volumes"])
    leaf = documents(DEPLOY / "kubernetes" / "certificates.yaml")[-1]
    assert leaf["spec"]["secretName"] == secret["secretName"]
    assert service["metadata"]["name"] in leaf["spec"]["dnsNames"]
    assert {item["path"] for item in secret["items"]} == {"ca-cert.pem", "worker-cert.pem", "worker-key.pem"}


@pytest.mark.integration
def test_p04_the_query_of_the_autoscaler_counts_the_queued_tasks_of_a_real_store(postgres_dsn: str) -> None:
    from tests.postgres_server import ask

    query = document("autoscaling.yaml", "ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]

    async def main() -> None:
        gate = asyncio.Event()
        stores = [headgate.PostgresStore(postgres_dsn) for _ in range(2)]
        pools: list[Any] = []
        for store in stores:
            pools.append(headgate.TaskPool("jobs", max_concurrent=1, scope="tenant", scope_id="acme", store=store))
            unregister(pools[-1])  # names are unique in a process, and each of them plays a process
        try:
            handles = [pool.submit_nowait(gate.wait) for pool in pools for _ in range(3)]
            assert {pool.id.partition("-")[0] for pool in pools} == {"pool"}
            await _polled(lambda: ask(postgres_dsn, query) == 5)
            gate.set()
            await headgate.pool_wait(handles)
            await _polled(lambda: ask(postgres_dsn, query) == 0)
        finally:
            gate.set()
            for pool in pools:
                await pool.close()
            for store in stores:
                store.close()

    asyncio.run(main())


async def _polled(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - it may be another process
            await asyncio.sleep(0.05)


# -- draining, with the command of the image --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deploy") / "certs"
    make_certificates(folder, ["headgate-workers"])
    return folder


def of_image(certificates: Path, address: str, *more: str) -> list[str]:
    """The arguments that the image and the Deployment give to `headgate worker`, for this machine."""
    [container] = document("workers.yaml", "Deployment")["spec"]["template"]["spec"]["containers"]
    _, _, *arguments = [*entry_point(), *container["args"], *more]
    changed = {"0.0.0.0:7070": f"{address}:{PORT}", "/certs": str(certificates), "--module=jobs": "--module=cli_jobs"}
    changed["--metrics-host=0.0.0.0"] = f"--metrics-host={address}"
    return [changed.get(one, one) for one in arguments]


@pytest.fixture
def pods(certificates: Path, tmp_path: Path) -> Iterator[list[Worker]]:
    """Two pods: on addresses of their own, and on the port that all of them have."""
    with (
        worker(tmp_path, *of_image(certificates, "127.0.0.71")) as one,
        worker(tmp_path, *of_image(certificates, "127.0.0.72")) as other,
    ):
        yield [one, other]


@asynccontextmanager
async def program(certificates: Path, name: Callable[[], list[str]]) -> AsyncIterator[headgate.WorkerPool]:
    """A pool that finds the pods by the name of the headless Service, as a program in the cluster does."""
    files = (certificates / name for name in ("ca-cert.pem", "worker-key.pem", "worker-cert.pem"))
    credentials = headgate.WorkerCredentials.from_files(*files, identity="headgate-workers", reload=True)
    discovery = headgate.DnsDiscovery(
        "headgate-workers.default.svc", PORT, secure=True, interval=0.1, resolver=lambda _: name()
    )
    async with headgate.WorkerPool(discovery=discovery, credentials=credentials, quorum=2, lazy=False) as pool:
        yield pool


def ready(pod: Worker) -> bool:
    """Ask as the kubelet does, with the readiness probe of the manifest: by the address of the pod."""
    [container] = document("workers.yaml", "Deployment")["spec"]["template"]["spec"]["containers"]
    probe = container["readinessProbe"]["httpGet"]
    [port] = [one["containerPort"] for one in container["ports"] if one["name"] == probe["port"]]
    host = pod.ready["address"].rpartition(":")[0]
    asked = http.client.HTTPConnection(host, port, timeout=PATIENCE)
    asked.request("GET", probe["path"])
    status = asked.getresponse().status
    asked.close()
    assert status in (200, 503)
    return status == 200


@pytest.mark.integration
def test_p04_a_pod_that_is_terminated_finishes_its_calls_and_others_take_the_new_ones(
    pods: list[Worker], certificates: Path, tmp_path: Path
) -> None:
    gate, leaving = tmp_path / "gate", pods[0]
    addresses = ["127.0.0.71", "127.0.0.72"]

    def there(views: list[WorkerView]) -> set[str]:
        return {view.address for view in views if view.state == "ready"}

    async def main() -> None:
        async with program(certificates, lambda: list(addresses)) as pool:
            await _polled(lambda: len(there(pool.workers())) == 2)
            assert await asyncio.to_thread(ready, leaving)
            began = [tmp_path / f"began-{number}" for number in range(6)]
            running = [asyncio.create_task(cli_jobs.wait_for(str(gate), str(path))) for path in began]
            await _polled(lambda: all(path.exists() for path in began))
            assert sorted(view.in_flight for view in pool.workers()) == [3, 3]
            leaving.signal(signal.SIGTERM)  # as the kubelet does, before it waits for the grace period
            await asyncio.to_thread(leaving.until_logged, "got SIGTERM: it finishes 3 calls")
            assert not await asyncio.to_thread(ready, leaving)
            addresses.remove("127.0.0.71")  # the endpoint leaves the name of the Service
            assert set(await asyncio.gather(*(cli_jobs.pid() for _ in range(8)))) == {pods[1].ready["pid"]}
            assert leaving.process.poll() is None, "it waits for its calls"
            gate.write_text("go")
            await asyncio.gather(*running)
            assert await asyncio.to_thread(leaving.wait) == 0
            assert await cli_jobs.double(4) == 8

    asyncio.run(main())


@pytest.mark.integration
def test_p04_what_outlasts_the_grace_is_cancelled_and_the_exit_code_says_so(certificates: Path, tmp_path: Path) -> None:
    with worker(tmp_path, *of_image(certificates, "127.0.0.73", "--grace", "0.2")) as pod:

        async def main() -> None:
            files = (certificates / name for name in ("ca-cert.pem", "worker-key.pem", "worker-cert.pem"))
            credentials = headgate.WorkerCredentials.from_files(*files, identity="headgate-workers")
            discovery = headgate.StaticDiscovery([pod.ready["address"]], secure=True)
            async with headgate.WorkerPool(discovery=discovery, credentials=credentials, quorum_timeout=1):
                began = tmp_path / "began"
                call = asyncio.create_task(cli_jobs.wait_for(str(tmp_path / "never"), str(began)))
                await _polled(began.exists)
                pod.signal(signal.SIGTERM)
                await asyncio.wait([call], timeout=PATIENCE)
                assert isinstance(call.exception(), (headgate.HeadgateError, asyncio.CancelledError))

        asyncio.run(main())
        assert pod.wait() == 128 + signal.SIGTERM


@pytest.mark.integration
def test_p04_o30_the_metrics_of_a_pod_say_when_its_certificate_expires(certificates: Path, tmp_path: Path) -> None:
    expires = check_certificates(certificates).expires
    assert expires is not None
    with worker(tmp_path, *of_image(certificates, "127.0.0.74")):
        asked = http.client.HTTPConnection("127.0.0.74", METRICS, timeout=PATIENCE)
        asked.request("GET", "/metrics")
        text = asked.getresponse().read().decode()
        asked.close()
    [told] = re.findall(r"^headgate_worker_certificate_expiry_timestamp_seconds (\S+)$", text, re.MULTILINE)
    assert float(told) == expires.timestamp()


# -- Slurm ------------------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_p04_a_job_of_the_array_writes_its_record_and_removes_it_when_it_ends(
    certificates: Path, tmp_path: Path
) -> None:
    """The script as bash runs it, with a `srun` that starts the step here."""
    tools, records = tmp_path / "bin", tmp_path / "records"
    tools.mkdir()
    for name, text in (
        ("srun", 'exec "$@"\n'),
        ("headgate", f'exec {shlex.join(command())} "$@"\n'),
        ("hostname", "echo 127.0.0.1\n"),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{text}", "utf-8")
        (tools / name).chmod(0o755)
    script = tmp_path / "workers.sbatch"
    script.write_text(files()["workers.sbatch"].replace("--module jobs", "--module cli_jobs"), "utf-8")
    env = environment({"RECORDS": str(records), "CERTS": str(certificates), "SLURM_ARRAY_TASK_ID": "3"})
    env["PATH"] = f"{tools}{os.pathsep}{env['PATH']}"
    log = (tmp_path / "log").open("w")
    with log, subprocess.Popen(["bash", str(script)], cwd=HERE, env=env, stderr=log, start_new_session=True) as job:
        try:
            until(lambda: list(records.glob("*.json")), "a record file")
            record = json.loads((records / "0-3.json").read_text("utf-8"))
            pid = record["pid"]

            async def main() -> None:
                discovery = headgate.StaticDiscovery([record["address"]], secure=record["secure"])
                files = (certificates / name for name in ("ca-cert.pem", "worker-key.pem", "worker-cert.pem"))
                credentials = headgate.WorkerCredentials.from_files(*files, identity="headgate-workers")
                async with headgate.WorkerPool(discovery=discovery, credentials=credentials):
                    assert await cli_jobs.double(21) == 42

            asyncio.run(main())
            os.kill(pid, signal.SIGTERM)  # as Slurm does, to the step
            assert job.wait(PATIENCE) == 0
            assert list(records.iterdir()) == []
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
