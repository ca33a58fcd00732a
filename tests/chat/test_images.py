"""Images in messages: parsing, rendering, tokens, and conversion at the boundaries."""

import copy
import gc
import pickle
from dataclasses import replace

import pytest

from ludus.chat.render import TemplateRenderer, decode_exactly
from ludus.chat.tags import TagsRenderer
from ludus.errors import UserError
from ludus.evaluation.tables import message_lines
from ludus.gateway.protocol.bodies import ChatMessage
from ludus.images import (
    IMAGE_IDS,
    MAX_PIXELS,
    Image,
    ImageToken,
    content_parts,
    digest_of,
    image_of_digest,
    image_url,
    read_image,
    restore_tokens,
    to_openai,
)
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord, read_rollouts, write_rollouts
from ludus.training.datasets.files import parse_record
from ludus.types import Message, Segment, StopReason, Trajectory
from tests.vision_models import BLUE, GREEN, LISTS_ONLY, RED, TEMPLATE, make_tokenizer, picture


class TwoTokens:
    """Images of two tokens between markers."""

    text, token_id = "<image>", 3

    def expand(self, image):
        return (4, ImageToken(image, 0), ImageToken(image, 1), 4)


def user(text, *images):
    return Message(role="user", content=text, images=list(images)) if images else Message(role="user", content=text)


def renderer(template=TEMPLATE):
    return TemplateRenderer(make_tokenizer(template), "auto", TwoTokens())


def images_in(tokens):
    return [digest_of(token) for token in tokens if token >= IMAGE_IDS]


def digests(*urls):
    return [digest for url in urls for digest in (read_image(url).digest,) * 2]


def test_the_marks_of_the_content_are_the_places_of_the_images():
    parts = content_parts(user("a <image> b <image>", RED, BLUE))
    assert parts == ["a ", read_image(RED), " b ", read_image(BLUE), ""]
    assert content_parts(user("an <image> of <image>", RED)) == [read_image(RED), "an <image> of <image>"]
    assert content_parts(user("no <image>")) == ["no <image>"]


@pytest.mark.parametrize("template", [TEMPLATE, LISTS_ONLY])
def test_images_are_rendered_in_their_places(template):
    made = renderer(template)
    tokens = made.prompt([user("x<image>y<image>", RED, BLUE), user("<image>", GREEN)], [])
    assert images_in(tokens) == digests(RED, BLUE, GREEN)
    assert decode_exactly(made.tokenizer, tokens) == (
        "<|im_start|>user\nx<fake_token_around_image><fake_token_around_image>y"
        "<fake_token_around_image><fake_token_around_image><|im_end|>\n"
        "<|im_start|>user\n<fake_token_around_image><fake_token_around_image><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template", [TEMPLATE, LISTS_ONLY])
def test_a_delta_has_the_tokens_of_the_whole_dialogue(template):
    made = renderer(template)
    first, reply, second = user("<image>?", RED), Message(role="assistant", content="r"), user("<image>??", BLUE)
    begun = (*made.prompt([first], []), *made.action([first], reply, []))
    assert (*begun, *made.observation([second])) == made.prompt([first, reply, second], [])


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_text_cannot_form_an_image(role):
    history = [user("<image>", RED), Message(role="assistant", content="s"), Message(role=role, content="a<image>b")]
    assert images_in(renderer().prompt(history, [])) == digests(RED)


@pytest.mark.parametrize("made", [TemplateRenderer(make_tokenizer()), TagsRenderer(make_tokenizer())])
def test_a_text_renderer_rejects_images(made):
    with pytest.raises(UserError, match="supports only text"):
        made.prompt([user("<image>", RED)], [])
    with pytest.raises(UserError, match="supports only text"):
        made.observation([user("<image>", RED)])


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.org/a.png", "not a data URL"),
        ("/tmp/a.png", "not a data URL"),
        (None, "not a data URL"),
        ("data:image/png;base64,%%%", "is invalid"),
        (image_url(b"nothing"), "cannot be decoded"),
        (image_url(picture((1, 2, 3))[:60]), "cannot be decoded"),
        (image_url(picture((1, 2, 3), (MAX_PIXELS // 1000, 1001))), "the limit is"),
    ],
)
def test_bad_images_are_user_errors(url, said):
    with pytest.raises(UserError, match=said):
        read_image(url)


def test_tokens_keep_their_image_and_survive_copies_and_processes():
    token = ImageToken(Image.of(picture((9, 8, 7))), 5)
    for other in (copy.deepcopy(token), pickle.loads(pickle.dumps((token,)))[0]):
        assert (other, other.image) == (token, token.image)
    digest = token.image.digest
    assert image_of_digest(digest).data == picture((9, 8, 7))
    del token, other
    gc.collect()
    with pytest.raises(UserError, match="not available"):
        image_of_digest(digest)


def test_rollout_files_restore_image_tokens(tmp_path):
    tokens = renderer().prompt([user("<image>", RED)], [])
    more = renderer().observation([user("<image>", GREEN)])
    messages = (user("<image>", RED), Message(role="assistant", content="r"), user("<image>", GREEN))
    action = Segment("action", (7,), logprobs=(-1.0,), versions=(0,))
    segments = (Segment("prompt", tokens), action, Segment("observation", more))
    one = Trajectory("t", 0, segments, messages, StopReason.MAX_TURNS)
    record = RolloutRecord(1, "t", RolloutOutcome.TRAINED, "", one)
    write_rollouts(tmp_path / "a.jsonl.gz", [record])
    (back,) = read_rollouts(tmp_path / "a.jsonl.gz")
    assert back == record
    assert all(isinstance(token, ImageToken) for token in back.trajectory.token_ids if token >= IMAGE_IDS)
    stray = replace(record, trajectory=replace(one, messages=messages[1:]))
    write_rollouts(tmp_path / "b.jsonl.gz", [stray])
    with pytest.raises(UserError, match="not a token id"):
        list(read_rollouts(tmp_path / "b.jsonl.gz"))
    assert restore_tokens((5, *tokens), ()) == (5, *tokens)


def test_openai_parts_become_messages_and_back():
    parts = [{"type": "text", "text": "What is "}, {"type": "image_url", "image_url": {"url": RED}}]
    message = ChatMessage.model_validate({"role": "user", "content": parts}).message
    assert message == user("What is <image>", RED)
    assert to_openai(message) == {"role": "user", "content": parts}
    assert to_openai(user("text")) == user("text")
    answer = {"role": "assistant", "content": "a square"}
    assert parse_record({"messages": [{"role": "user", "content": parts}, answer]}).messages[0] == message
    broken = [{"type": "image_url", "image_url": {"url": image_url(b"nothing")}}]
    with pytest.raises(ValueError, match=r"messages\[0\].images\[0\]: An image cannot be decoded"):
        parse_record({"messages": [{"role": "user", "content": broken}, answer]})


def test_views_describe_images():
    (line,) = message_lines(user("Look: <image>!", image_url(picture((1, 1, 1), (20, 10)))))
    assert line.startswith("Look: [image 20x10 ")
    assert line.endswith("]!")
