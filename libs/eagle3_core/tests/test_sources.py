"""Data comes from files under the operator's folders; nothing outside can be read, or even asked about."""

import pytest

from eagle3_core.data.sources import SourceNotAllowed, SourceScheme, fingerprint, path_of, resolve, roots_of


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "a b.jsonl").write_text("{}")
    (tmp_path / "secret").write_text("{}")
    return folder


@pytest.mark.parametrize(
    "form", ["{root}/a b.jsonl", "file://{root}/a%20b.jsonl", "file://localhost{root}/a%20b.jsonl"]
)
def test_a_path_and_a_file_uri_name_the_same_file(root, form):
    uri = form.format(root=root)

    assert path_of(uri) == resolve(uri, [root]) == root / "a b.jsonl"


def test_a_file_that_is_not_there_still_has_a_place(root):
    assert resolve(f"{root}/later", [root]) == root / "later"


def test_any_of_several_roots_will_do(root, tmp_path):
    assert resolve(str(root / "a b.jsonl"), [tmp_path / "other", root]) == root / "a b.jsonl"


def test_a_root_that_is_a_link_holds_what_it_leads_to(root, tmp_path):
    (tmp_path / "link").symlink_to(root)

    assert resolve(f"{tmp_path}/link/a b.jsonl", [tmp_path / "link"]) == root / "a b.jsonl"


@pytest.mark.parametrize(
    "uri", ["{root}/../secret", "{root}/link", "file://{root}/%2e%2e/secret", "{root}x", "/etc/passwd"]
)
def test_what_leads_out_of_the_roots_is_refused_whether_it_exists_or_not(root, uri):
    (root / "link").symlink_to(root.parent / "secret")

    with pytest.raises(SourceNotAllowed) as caught:
        resolve(uri.format(root=root), [root], pointer="/datasets/0/uri")

    assert (caught.value.code, caught.value.pointer) == ("source.not_allowed", "/datasets/0/uri")
    assert "AERIE_FILE_ROOTS" in caught.value.remedy


def test_a_tenant_s_root_holds_that_tenant_s_files_only(tmp_path):
    for name in ("red", "blue"):
        (tmp_path / name).mkdir()
    roots = [tmp_path / "{tenant}", tmp_path / "models"]

    assert resolve(f"{tmp_path}/red/x.jsonl", roots_of("red", roots)) == tmp_path / "red/x.jsonl"
    assert resolve(f"{tmp_path}/models/x", roots_of("red", roots)) == tmp_path / "models/x"
    for uri in (f"{tmp_path}/blue/x.jsonl", f"{tmp_path}/red/../blue/x.jsonl", f"{tmp_path}/{{tenant}}/x.jsonl"):
        with pytest.raises(SourceNotAllowed, match="red"):
            resolve(uri, roots_of("red", roots))


def test_without_roots_nothing_is_allowed(root):
    with pytest.raises(SourceNotAllowed, match="none"):
        resolve(str(root), [])


@pytest.mark.parametrize(
    "uri",
    [
        "http://host/x", "s3://bucket/x", "hf:org/name", "relative/x", "", "file://host/x", "file:relative", "file:///x?y=1",
        "file:///x#y", "file:///x%00y", "/x\0y", "file://[/x",
        "http://127.0.0.1:80/x", "http://[::ffff:127.0.0.1]/x", "http://2130706433/x", "http://0x7f.1/x", "http://user@10.0.0.1/x",
        "http://127.0.0.1.nip.io/x", "HTTPS://127.0.0.1/x", "ftp://127.0.0.1/x", "http://169.254.169.254/latest/meta-data/",
        "http://metadata.google.internal/", "s3://bucket/x?endpoint=http://127.0.0.1", "gopher://127.0.0.1/_x",
        "file://127.0.0.1:80/x", "\\\\127.0.0.1\\x",
    ],
)  # fmt: skip
def test_other_kinds_of_uris_are_refused(root, uri):
    with pytest.raises(SourceScheme) as caught:
        resolve(uri, [root], pointer="/datasets/0/uri")

    assert (caught.value.code, caught.value.pointer) == ("source.scheme", "/datasets/0/uri")
    assert "absolute path" in caught.value.remedy


def test_a_fingerprint_is_of_the_content_alone(root):
    (root / "copy").write_text("{}")

    assert fingerprint(root / "copy") == fingerprint(root / "a b.jsonl")
