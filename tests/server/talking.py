"""The tiny model with a tokenizer and a chat template."""

from __future__ import annotations

import copy
import dataclasses

from tiny import spoken

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}|{% endfor %}assistant:"


def talking():
    tokenizer = copy.deepcopy(spoken().tokenizer)
    tokenizer.chat_template = TEMPLATE
    return dataclasses.replace(spoken(), tokenizer=tokenizer)
