"""Certificates for development: what is made, what is refused, and what a check finds."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from headgate import InvalidArgument, InvalidType, WorkerCredentials, certs
from headgate.certs import CertificateReport, check_certificates, make_certificates
from tests.support.workers.certificates import DAY, Authority, Pair, serial
from tests.support.workers.support import run
from tests.support.workers.tls_support import call, serving

NAMES = ("ca-cert.pem", "ca-key.pem", "worker-cert.pem", "worker-key.pem")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A directory with certificates."""
    make_certificates(tmp_path / "certs")
    return tmp_path / "certs"


def files_of(folder: Path) -> tuple[Path, Path, Path]:
    return folder / "ca-cert.pem", folder / "worker-key.pem", folder / "worker-cert.pem"


def complaints(folder: Path) -> list[tuple[str, str, str]]:
    return [(one.level, one.file, one.text) for one in check_certificates(folder).findings]


def put(folder: Path, pair: Pair, ca: Authority) -> None:
    """Replace what is there by these."""
    for path, data in zip(files_of(folder), (ca.cert, *pair), strict=True):
        path.write_bytes(data)
    (folder / "ca-key.pem").unlink(missing_ok=True)


# -- making -----------------------------------------------------------------------------------------------------------


def test_w72_a_ca_and_certificates_are_made_and_work(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        report = make_certificates(tmp_path / "new" / "certs", ["gpu-3.example.org", "10.0.0.7", "*.workers.example"])
    finally:
        os.umask(before)
    folder = tmp_path / "new" / "certs"
    assert report.ok
    assert report.findings == ()
    assert report.directory == os.fspath(folder)
    assert sorted(map(os.path.basename, report.made)) == sorted(NAMES) == sorted(os.listdir(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {name: stat.S_IMODE((folder / name).stat().st_mode) for name in NAMES} == {
        "ca-cert.pem": 0o644,
        "ca-key.pem": 0o600,
        "worker-cert.pem": 0o644,
        "worker-key.pem": 0o600,
    }
    assert {"localhost", "127.0.0.1", "::1", "gpu-3.example.org", "10.0.0.7", "*.workers.example"} <= set(report.names)
    assert socket.gethostname() in report.names
    now = datetime.now(UTC)
    assert report.expires is not None
    assert report.ca_expires is not None
    assert timedelta(days=364) < report.expires - now < timedelta(days=366)
    assert report.ca_expires > report.expires

    async def main() -> None:
        for mutual in (True, False):
            ours = WorkerCredentials.from_files(*files_of(folder), mutual)
            named = WorkerCredentials.from_files(*files_of(folder), mutual, identity="gpu-3.example.org")
            async with serving(ours) as (address, _):
                assert await call(address, ours) == await call(address, named) == "answered"

    run(main)


def test_w72_the_ca_makes_further_certificates(made: Path) -> None:
    first = serial((made / "worker-cert.pem").read_bytes())
    ca = (made / "ca-cert.pem").read_bytes()
    for name in ("worker-cert.pem", "worker-key.pem"):
        (made / name).rename(made / f"old-{name}")
    report = make_certificates(made, ["another.example"], days=7)
    assert [os.path.basename(path) for path in report.made] == ["worker-key.pem", "worker-cert.pem"]
    assert "another.example" in report.names
    assert serial((made / "worker-cert.pem").read_bytes()) != first
    assert (made / "ca-cert.pem").read_bytes() == ca
    assert report.ok
    [soon] = report.findings
    assert soon.level == "warning"


@pytest.mark.parametrize("name", ["worker-cert.pem", "worker-key.pem", "both"])
def test_w72_nothing_is_overwritten(made: Path, name: str) -> None:
    if name != "both":
        (made / name).unlink()
    before = {path: path.read_bytes() for path in made.iterdir()}
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        make_certificates(made)
    assert {path: path.read_bytes() for path in made.iterdir()} == before


def test_w72_half_a_ca_is_refused(made: Path) -> None:
    for name in ("worker-cert.pem", "worker-key.pem"):
        (made / name).unlink()
    key = (made / "ca-key.pem").read_bytes()
    (made / "ca-key.pem").unlink()
    with pytest.raises(FileNotFoundError, match=r"a ca-cert.pem and no ca-key.pem"):
        make_certificates(made)
    (made / "ca-key.pem").write_bytes(key)
    (made / "ca-cert.pem").unlink()
    with pytest.raises(FileExistsError, match=r"a ca-key.pem and no ca-cert.pem"):
        make_certificates(made)
    (made / "ca-cert.pem").write_bytes(Authority().cert)
    with pytest.raises(InvalidArgument, match="is not the key of"):
        make_certificates(made)
    assert sorted(os.listdir(made)) == ["ca-cert.pem", "ca-key.pem"], "nothing half-made is left"


def test_w72_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "certs").mkdir(0o700)
    (tmp_path / "certs" / "worker-key.pem").symlink_to(tmp_path / "theirs")
    with pytest.raises(FileExistsError):
        make_certificates(tmp_path / "certs")
    assert not (tmp_path / "theirs").exists()


def test_w72_keys_are_not_put_where_others_write(tmp_path: Path) -> None:
    (tmp_path / "certs").mkdir()
    (tmp_path / "certs").chmod(0o777)
    with pytest.raises(PermissionError, match=r"others can write .*chmod 700"):
        make_certificates(tmp_path / "certs")
    if os.geteuid() == 0:
        (tmp_path / "certs").chmod(0o700)
        os.chown(tmp_path / "certs", 65534, 65534)
        with pytest.raises(PermissionError, match="belongs to the user 65534"):
            make_certificates(tmp_path / "certs")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        make_certificates(tmp_path / "file")


@pytest.mark.parametrize("name", ["", "host:80", "http://host", "a b", "-host", "ho*st", "bücher.example", "a..b"])
def test_w72_what_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="neither a host name nor an IP address"):
        make_certificates(tmp_path / "certs", [name])
    assert not (tmp_path / "certs").exists()


def test_w72_names_are_a_list_and_days_a_number(tmp_path: Path) -> None:
    with pytest.raises(InvalidType, match="names must be a list"):
        make_certificates(tmp_path / "certs", "host")
    with pytest.raises(InvalidType, match="a name must be a string"):
        make_certificates(tmp_path / "certs", [b"host"])  # type: ignore[list-item]
    for days in (0, -1, 1.5, True):
        with pytest.raises(InvalidArgument, match="days must be >= 1"):
            make_certificates(tmp_path / "certs", days=days)  # type: ignore[arg-type]


def test_w72_without_cryptography_it_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None; import headgate\n"
        "try: headgate.certs.make_certificates(sys.argv[1])\n"
        "except ImportError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code, tmp_path / "x"], capture_output=True, text=True, check=True)
    assert "pip install 'headgate[certs]'" in out.stdout
    assert not (tmp_path / "x").exists()


# -- checking ---------------------------------------------------------------------------------------------------------


def test_w72_a_good_directory_has_no_findings(made: Path) -> None:
    report = check_certificates(made)
    assert report.ok
    assert report.findings == report.made == ()
    told = json.loads(json.dumps(report.to_dict()))
    assert told["ok"] is True
    assert report.expires is not None
    assert told["expires"] == report.expires.isoformat()
    (made / "ca-key.pem").unlink()  # which no worker needs
    assert check_certificates(made).findings == ()


def test_w72_what_is_missing_is_named(made: Path) -> None:
    for name in ("ca-cert.pem", "worker-cert.pem", "worker-key.pem"):
        (made / name).unlink()
    report = check_certificates(made)
    assert not report.ok
    assert report.expires is report.ca_expires is None
    assert {(one.file, one.text) for one in report.findings} == {
        (name, "it is missing") for name in ("ca-cert.pem", "worker-cert.pem", "worker-key.pem")
    }
    [nowhere] = check_certificates(made / "nowhere").findings
    assert "there is no directory" in nowhere.text


@pytest.mark.parametrize("name", ["ca-key.pem", "worker-key.pem"])
def test_w72_a_key_that_others_can_read_is_named(made: Path, name: str) -> None:
    (made / name).chmod(0o640)
    assert complaints(made) == [("error", name, "others can read it or write to it (mode 0640)")]
    made.chmod(0o777)
    assert [one[:2] for one in complaints(made)] == [("error", ""), ("error", name)]


@pytest.mark.parametrize(
    ("start", "end", "level", "text"),
    [
        (-2 * DAY, -DAY, "error", "it expired at"),
        (DAY, 2 * DAY, "error", "it is not valid before"),
        (-DAY, 10 * DAY, "warning", "it expires at"),
        (-DAY, 40 * DAY, "", ""),
    ],
)
def test_w72_dates_are_checked(made: Path, start: Any, end: Any, level: str, text: str) -> None:
    ca = Authority(end=400 * DAY)
    put(made, ca.issue(start=start, end=end), ca)
    found = complaints(made)
    if level:
        assert [one[:2] for one in found if one[2].startswith(text)] == [(level, "worker-cert.pem")]
    else:
        assert found == []


def test_w72_the_file_of_the_ca_may_hold_several(tmp_path: Path) -> None:
    """As while one CA takes the place of another: docs/security.md."""
    old, new = tmp_path / "old", tmp_path / "new"
    make_certificates(old)
    make_certificates(new)
    both = (old / "ca-cert.pem").read_bytes() + (new / "ca-cert.pem").read_bytes()
    for folder in (old, new):
        (folder / "ca-cert.pem").write_bytes(both)
        report = check_certificates(folder)
        assert (report.ok, report.findings) == (True, ())
    for name in ("worker-cert.pem", "worker-key.pem"):
        (new / name).unlink()
    assert make_certificates(new).ok, "the CA that the key belongs to has signed it, and it is not the first"
    (new / "ca-key.pem").write_bytes((old / "ca-key.pem").read_bytes())
    assert check_certificates(new).ok
    make_certificates(tmp_path / "third")
    for name in ("worker-cert.pem", "worker-key.pem"):
        (new / name).write_bytes((tmp_path / "third" / name).read_bytes())
    assert complaints(new) == [("error", "worker-cert.pem", "it is not signed by a CA of ca-cert.pem")]


def test_w72_an_old_ca_that_expired_is_a_warning_and_what_is_no_ca_an_error(made: Path) -> None:
    old, ours = Authority("old", start=-2 * DAY, end=-DAY), (made / "ca-cert.pem").read_bytes()
    (made / "ca-cert.pem").write_bytes(old.cert + ours)
    report = check_certificates(made)
    [finding] = report.findings
    assert (report.ok, finding.level, finding.file) == (True, "warning", "ca-cert.pem")
    assert finding.text.startswith("certificate 1 of 2 expired at")
    assert report.ca_expires is not None
    assert report.ca_expires > datetime.now(UTC), "that of the CA which signed the worker's certificate"
    (made / "ca-cert.pem").write_bytes(ours + (made / "worker-cert.pem").read_bytes())
    assert complaints(made) == [("error", "ca-cert.pem", "certificate 2 of 2 is not the certificate of a CA")]


def test_w72_a_key_that_a_former_ca_left_is_a_note(made: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path / "new")
    for name in ("ca-cert.pem", "worker-cert.pem", "worker-key.pem"):
        (made / name).write_bytes((tmp_path / "new" / name).read_bytes())
    report = check_certificates(made)
    [finding] = report.findings
    assert (report.ok, finding.level, finding.file) == (True, "note", "ca-key.pem")
    assert "Remove it" in finding.remedy


@pytest.mark.parametrize(
    ("hours", "told"),
    [(24.9, "24 hours"), (1.9, "1 hour"), (0.175, "10 minutes"), (72.9, "3 days")],
)
def test_w72_a_certificate_that_soon_expires_says_in_what_time(made: Path, hours: float, told: str) -> None:
    ca = Authority(end=400 * DAY)
    put(made, ca.issue(end=timedelta(hours=hours)), ca)
    [(level, file, text)] = complaints(made)
    assert (level, file) == ("warning", "worker-cert.pem")
    assert text.endswith(f", in {told}"), text


def test_w72_what_does_not_belong_together_is_named(made: Path) -> None:
    ca, other = Authority(end=400 * DAY), Authority(end=400 * DAY)
    good = ca.issue(end=400 * DAY)
    put(made, Pair(other.good.key, good.cert), ca)
    assert complaints(made) == [("error", "worker-key.pem", "it is not the key of worker-cert.pem")]
    put(made, other.issue(end=400 * DAY), ca)
    assert complaints(made) == [("error", "worker-cert.pem", "it is not signed by the CA of ca-cert.pem")]
    put(made, good, ca)
    (made / "ca-cert.pem").write_bytes(good.cert)
    assert ("error", "ca-cert.pem", "it is not the certificate of a CA") in complaints(made)
    put(made, good, ca)
    (made / "worker-cert.pem").write_bytes(b"nonsense")
    [(level, name, text)] = complaints(made)
    assert (level, name) == ("error", "worker-cert.pem")
    assert "it is not a certificate as PEM" in text


def test_findings_are_sentences(made: Path) -> None:
    (made / "worker-key.pem").chmod(0o644)
    [finding] = check_certificates(made).findings
    assert str(finding).startswith("error: worker-key.pem: others can read it or write to it (mode 0644). chmod 600 ")


def test_a_report_is_a_value() -> None:
    assert CertificateReport("d", (), (), None, None) == CertificateReport("d", (), (), None, None)
    assert certs.CA_CERT == "ca-cert.pem"
