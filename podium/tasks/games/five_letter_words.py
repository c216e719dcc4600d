"""Common English words of five letters, for the task `wordle`.

Written down by Podium's authors, letter by letter, from everyday vocabulary; not taken from any other list, corpus or
game. They are part of Podium, under its licence. No names, and no plurals that only add an s.
"""

_TEXT = """
about above abuse actor acute adapt admit adopt adult after again agent agree ahead alarm album alert alien alike
alive alley allow alone along alter amber amend among ample angel anger angle angry ankle annoy apart apple apply
apron arena argue arise armor aroma arrow aside asset atlas attic audio audit avoid await awake award aware
awful bacon badge badly baker basic basil basin batch beach beard beast began begin being belly below bench berry
birth black blade blame bland blank blast blaze bleak blend bless blind blink block blond blood bloom board boast
bonus boost booth bored bound bowel brace brain brake brand brave bread break breed brick bride brief bring brisk
broad broke broom broth brown brush build built bunch burst buyer cabin cable camel canal candy canoe cargo carry
carve catch cause cease cedar chain chair chalk charm chart chase cheap cheat check cheek cheer chess chest chief
child chill choir choke chord chose chunk cider cigar civil claim clash clasp class clean clear clerk
click cliff climb cling cloak clock close cloth cloud clown coach coast cobra cocoa color comet comic coral couch
cough could count court cover crack craft crane crash crawl crazy cream creek crept crest crime crisp cross crowd
crown crude cruel crumb crush crust curly curry curse curve cycle daily dairy daisy dance death debit debut decay
delay dense depth diary dirty disco ditch diver dizzy dodge donor doubt dough dozen draft drain drama drank drawn
dread dream dress dried drift drill drink drive drove drown drunk dusty dwarf eager eagle early earth easel eight
elbow elder elect elite empty enemy enjoy enter entry equal error essay ethic event every exact exist extra fable
faint fairy faith false fancy fatal fault favor feast fence ferry fetch fever fewer fiber field fiery fifth fifty
fight final first flake flame flank flash flask fleet flesh float flock flood floor flour fluid flute focus foggy
force forge forty forum found frail frame fraud fresh fried front frost frown fruit fully funny fuzzy gauge ghost
giant given glass gleam globe gloom glory glove going goose grace grade grain grand grant grape graph grasp grass
grave gravy great greed green greet grief grill grind groan groom group grove growl grown guard guess guest guide
guilt habit hairy handy happy harsh haste hasty hatch haunt heart heavy hedge hello hence hinge hobby honey honor
horse hotel hound house hover human humid humor hurry ideal image imply inbox index inner input irony issue ivory
jelly jewel joint joker jolly judge juice juicy kayak kneel knelt knife knock known label labor large laser later
laugh layer learn least leave ledge legal lemon level lever light lilac limit linen liver lobby local lodge lofty
logic loose loser lotus loyal lucky lunar lunch lyric magic major maker mango manor maple march marry match maybe
mayor medal media melon mercy merge merit merry metal meter metro might minor minus mixed model moist money month
moral motor motto mount mouse mouth movie muddy music naive nasty naval nerve never newly niece night ninth noble
noise noisy north novel nurse oasis ocean offer often olive onion opera orbit order organ other otter ought ounce
outer owner oxide paint panda panel panic paper party pasta paste patch pause peace peach pearl pedal penny perch
phase phone photo piano piece pilot pinch pitch pizza place plain plane plant plate plaza plead point polar porch
pouch pound power press price pride prime print prior prize probe proof proud prove prune pulse punch pupil puppy
purse queen query quest queue quick quiet quilt quite quote radar radio rainy raise rally ranch range rapid ratio
razor reach react ready realm rebel refer reign relax relay reply rhyme rider ridge rifle right rigid rinse risky
rival river roast robin robot rocky rough round route royal rugby ruler rumor rural rusty sadly saint salad salon
salty sandy satin sauce scale scare scarf scary scene scent scope score scout scrap screw seize sense serve seven
shade shady shaft shake shall shame shape share shark sharp shave sheep sheet shelf shell shift shine shiny shirt
shock shore short shout shown shrub shrug sight silly since siren sixth sixty skate skill skirt skull slate sleep
sleet slice slide slope small smart smell smile smoke snack snail snake sneak snowy sober solar solid solve sorry
sound south space spade spare spark speak spear speed spell spend spice spicy spike spill spine spite split spoil
spoke spoon sport spray squad stack staff stage stain stair stake stamp stand stare start state steak steal steam
steel steep steer stern stick stiff still sting stock stone stool store storm story stove straw strip stuck study
stuff style sugar suite sunny super surge swamp swarm swear sweat sweep sweet swell swept swift swing sword table
taken tally taste teach tempo tenor tenth thank theft their theme there thick thief thigh thing think third thorn
those three threw throw thumb tidal tiger tight timer tired title toast today token tooth topic torch total touch
tough towel tower toxic trace track trade trail train trait tread treat trend trial tribe trick tried troop truck
truly trunk trust truth tulip tutor twice twist uncle under union unite unity until upper upset urban urged usage
usual vague valid valor value valve vault verse video villa vinyl virus visit vital vivid vocal voice vowel wagon
waist waste watch water weary weave wedge weigh weird whale wheat wheel where which while white whole whose widow
width witty woman world worry worse worst worth would wound woven wrist write wrong wrote yacht yeast yield young
yours youth zebra
"""
WORDS = tuple(_TEXT.split())
