"""The trainer. Called, `podium.train` is the function of that name in `podium.api.train`."""

import podium

podium.make_verb(__name__)
