"""The trainer. As a function, `podium.train` is `podium.api.train.train`."""

import podium

podium.make_verb(__name__)
