"""evaluation/prompts.py: a file of prompts is read as pandas wrote it, and an invalid prompt is named with its line."""

from __future__ import annotations

import csv
import io
import re

import pytest

from evaluation.prompts import Prompt, read_prompts

HEADER = "image_id\tid\tcaption\n"


def written(tmp_path, text: str | bytes):
    path = tmp_path / "prompts.tsv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_captions_come_back_as_another_writer_has_quoted_them(tmp_path):
    captions = ['A "stop" sign', '"Quoted"', "tab\tin it", "accents: café", "an apostrophe's", "separator \u2028 in it"]
    file = io.StringIO()
    writer = csv.writer(file, delimiter="\t", lineterminator="\n")
    writer.writerows([("image_id", "id", "caption"), *((100 + n, n, c) for n, c in enumerate(captions))])
    found = read_prompts(written(tmp_path, file.getvalue()))
    assert list(found.prompts) == [Prompt(n, 100 + n, caption) for n, caption in enumerate(captions)]
    assert not found.partial


def test_the_order_of_columns_a_mark_at_the_beginning_and_windows_lines_do_not_matter(tmp_path):
    path = written(tmp_path, b"\xef\xbb\xbfcaption\tother\tid\timage_id\r\na cat\tx\t7\t9\r\n\r\na dog\ty\t8\t10\r\n")
    assert list(read_prompts(path).prompts) == [Prompt(7, 9, "a cat"), Prompt(8, 10, "a dog")]


def test_the_first_prompts_of_a_file_are_partial_and_all_of_them_are_not(tmp_path):
    path = written(tmp_path, HEADER + "1\t1\ta\n2\t2\tb\n")
    assert [prompt.caption for prompt in read_prompts(path, 1).prompts] == ["a"]
    assert read_prompts(path, 1).partial and not read_prompts(path, 2).partial


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image_id\tcaption\n1\ta\n", "its first line has 'image_id', 'caption', not each of"),
        (HEADER, "has a header and no prompt. Give a file with at least one."),
        (HEADER + "1\t1\ta\n2\t2\t  \n", "line 3 (id 2) has a caption that is empty, or has a NUL character. Fix it, "),
        (HEADER + "1\t1\ta\n2\t1\tb\n", "several prompts have the id 1. An id names one prompt and its noise"),
        (HEADER + "1\t\u0661\ta\n", "line 2 has id '\u0661', not a whole number"),
        (HEADER + '1\t1\tb\n1\t2\t"a" cat\n', "line 3 cannot be read: 'TAB' expected after '\"'. Its quotation marks"),
        pytest.param(HEADER + f"1\t7\t{'a' * 10_001}\n", "line 2 (id 7) has a caption of 10,001 characters", id="long"),
        (HEADER + "1\t2\n", "line 2 has 2 columns, its header 3. Fix that line."),
        (b"\xff\xfe\x00", "is not UTF-8 text (byte 0)"),
    ],
)
def test_a_file_without_prompts_is_refused_with_its_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_prompts(written(tmp_path, text))


def test_a_file_that_is_not_there_and_too_many_prompts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="none.tsv cannot be read: No such file or directory"):
        read_prompts(str(tmp_path / "none.tsv"))
    path = written(tmp_path, HEADER + "1\t1\ta\n")
    with pytest.raises(ValueError, match=re.escape(f"eval.num_prompts: 2, but {path} has 1. Possible: 1 to that.")):
        read_prompts(path, 2)
