"""The closed word lists of the tiny task; the tokenizer holds each of these words as one token."""


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(text.split()))


FEMALE_NAMES = _words("""
Abigail Ada Adele Agnes Aisha Alba Alice Alicia Alma Amanda Amber Amelia Amina Amy Ana Andrea Angela Anita Anna
Annika Aria Asha Astrid Audrey Aurora Ava Ayla Barbara Beatrice Becky Bella Bertha Beth Bianca Birgit Bonnie Bridget
Camila Carla Carmen Carol Caroline Cecilia Celia Charlotte Chloe Clara Claire Clio Cora Daisy Dana Daniela Daphne
Daria Deborah Delia Diana Dina Dora Doris Edith Eileen Elena Elisa Ella Ellen Elsa Emilia Emily Emma Erica Erin Esme
Esther Eva Evelyn Fatima Fay Felicia Fiona Flora Florence Frances Freya Frida Gabriela Gemma Georgia Gina Giulia
Gloria Grace Greta Gwen Hailey Hana Hanna Harriet Hazel Heather Heidi Helen Helga Hilda Holly Ida Ilse Imani Ines
Inga Ingrid Irene Iris Isabel Ivana Ivy Jada Jana Jane Janet Jasmine Jenna Jennifer Jessica Joan Jocelyn Johanna
Josie Joyce Judith Julia Juliet June Kara Karen Karin Kate Katya Kayla Keiko Kelly Kim Kira Klara Lara Laura Lea
Leah Leila Lena Leona Lila Lily Linda Lisa Liv Lola Lorna Lotte Louisa Lucia Lucy Luna Lydia Mabel Madison Maeve
Maja Mara Margo Maria Marina Marta Mary Matilda Maya Megan Melissa Mia Mila Mina Mira Miriam Molly Mona Monica Nadia
Naomi Natalie Nell Nicole Nina Noemi Nora Olga Olive Olivia Paige Pamela Paula Pearl Penny Petra Phoebe Polly Priya
Rachel Rana Rebecca Renata Rhea Rita Roberta Rosa Rose Ruby Ruth Sabina Sadie Sally Samira Sandra Sara Selma Sheila
Sofia Sonia Stella Susan Sylvia Tamara Tara Teresa Tessa Thea Tina Una Ursula Vera Victoria Viola Vivian Wanda Wendy
Willa Yara Yoko Yvonne Zara Zoe
""")

MALE_NAMES = _words("""
Aaron Abel Adam Adrian Ahmed Alan Albert Aldo Alex Ali Alvin Amir Anders Andrew Anton Archie Arjun Arlo Arnold
Arthur Asher Axel Basil Ben Bernard Bjorn Boris Brad Brandon Brett Brian Bruce Bruno Caleb Carl Carlos Cedric Chad
Charles Chris Clark Claude Clive Cody Colin Conrad Craig Curtis Cyril Damon Daniel Dario David Dean Dennis Derek
Diego Dirk Dmitri Dominic Donald Duncan Dylan Earl Eddie Edgar Edmund Edward Edwin Eli Elias Elliot Emil Enzo Eric
Ernest Ethan Eugene Evan Ezra Fabian Felix Fergus Finn Floyd Frank Franz Fred Gabriel Gareth Gary Gavin George
Gerald Gilbert Giles Glen Gordon Graham Grant Greg Gustav Guy Hal Hamza Hans Harold Harry Harvey Hassan Hector Henry
Herbert Homer Horace Howard Hugh Hugo Ian Igor Ike Isaac Ivan Jack Jacob Jake Jamal James Jan Jared Jason Jasper
Javier Jay Jeff Jeremy Jerome Jesse Jim Joel John Jonas Jonathan Jorge Jose Joseph Joshua Juan Jude Julian Julius
Justin Karl Keith Kenji Kenneth Kevin Kirk Kurt Kyle Lars Laurence Lee Leo Leon Leonard Leroy Leslie Lewis Liam
Linus Logan Louis Luca Lucas Luis Luke Malcolm Manuel Marco Mario Mark Martin Marvin Mason Mateo Matthew Max Miguel
Miles Milo Mitch Mohamed Morris Murray Nathan Ned Neil Nick Nigel Noah Noel Norman Oliver Omar Oscar Otis Otto Owen
Pablo Patrick Paul Pedro Percy Peter Philip Pierre Quentin Quinn Rafael Ralph Ramon Raj Ravi Ray Rex Rhys Richard
Rob Roger Roland Roman Ron Ross Roy Rufus Russell Ryan Sam Samuel Saul Scott Sean Sergio Seth Shane Sidney Simon
Stanley Stefan Steven Stuart Sven Tariq Ted Terry Theo Thomas Tim Tobias Todd Tom Tony Travis Trevor Troy Tyler Umar
Victor Vincent Wade Walter Warren Wayne Wesley Will Xavier Yusuf Zach
""")

NOUNS = _words("""
acorns almonds anchors ankles apples apricots aprons arrows axes badges bagels balloons balls bananas bandages
bangles banners barrels baseballs basins batteries beads beans bears beetles bells belts berries bibs bicycles birds
biscuits blankets blocks blossoms blouses boats bolts bones bonnets books boots bottles bowls bows bracelets
branches bricks brooches brooms brownies brushes bubbles buckles bugs bulbs burgers buses bushes butterflies buttons
cabbages cables cactuses cakes calculators calendars cameras candles candies canes canoes caps cards carpets carrots
cars cats cashews catalogs chairs chalks charms charts cherries chess chestnuts chickens chips chisels chocolates
cinnamons clams clips clocks cloths clovers coasters coats coconuts coins collars combs comics compasses cones
cookies corks corns costumes couches coupons crabs crackers crayons crickets croissants crosses crowns crystals
cubes cucumbers cupcakes cups curtains cushions cymbals daisies darts dates desks diamonds diaries dice dinosaurs
dishes dogs dolls dolphins donuts doors doughnuts dragons drawings dresses drills drums ducks dumplings earrings
easels eggs elephants emeralds engines envelopes erasers fans feathers fences ferns fiddles figs files films fish
flags flasks flowers flutes flyers folders foxes forks fossils frames frogs fruits funnels games garlands gears gems
geese giraffes glasses globes gloves goats goblets gourds grapes grapefruits guitars guppies hammers hamsters
handbags hangers harps hats hawks headbands hearts hedgehogs helmets herbs hinges hooks horns horses hoses icicles
inks insects irons jackets jars jeans jellybeans jewels jigsaws journals jugs kayaks kettles keyboards keychains
keys kites kittens kiwis knives knobs knots labels lace ladders ladles lambs lamps lanterns laptops leaflets leaves
leeks lemons lenses lentils letters lettuces levers lids lilies limes lions lizards lobsters lockets locks logs
lollipops loops lutes magazines magnets mangoes maps marbles markers marshmallows masks mats matches medals melons
menus mice microphones mints mirrors mittens mops mosaics motors muffins mugs mushrooms nails napkins necklaces
needles nests nets newspapers noodles notebooks notes novels nuts oars octopuses olives onions oranges orchids
ornaments oysters paddles paintings pajamas pancakes pandas pans papayas parrots pastries patches peaches peacocks
peanuts pears pebbles pecans pencils pendants penguins pens peppers petals phones photos pianos pickles pictures
pies pigeons piglets pillows pinecones pinwheels pistachios pizzas planes plants plates plums poems polishes pompoms
ponies poppies posters postcards potatoes pots pretzels prisms prunes puddings pumpkins puppets puppies purses
puzzles quails quartzes quilts quinces rabbits raccoons radios radishes rafts raisins rakes raspberries rattles
razors receipts recipes records reindeer ribbons rings robes robots rockets rocks roosters ropes roses rubies rugs
rulers saddles sails salads sandals sandwiches sapphires saris sausages saws scarves scissors scones scooters
screens screws scrolls seals seashells seeds shawls sheep shells shelves shields shirts shoes shovels shrimps signs
skates sketches skirts skis sleds slippers snails snakes snowballs soaps socks sofas spades spatulas spices spiders
spinners sponges spoons springs squashes squirrels stamps staplers stars statues stickers sticks stones stools
stories straws strawberries strings sunflowers sweaters swords tables tablets tacks tambourines tapes tarts teapots
telescopes tents thimbles threads thermometers tickets ties tigers tiles tins toasters toffees tokens tomatoes tongs
tools toothbrushes torches tortoises towels toys tractors trains trees triangles trophies trucks trumpets tubes
tulips tunics turnips turtles twigs umbrellas urns vases vests violets violins waffles wagons wallets walnuts
watches watermelons whales wheels whistles wigs windmills wreaths wrenches yachts yams yogurts zebras zippers
""")

ADJECTIVES = _words("""
red blue green yellow orange purple pink white black brown gray silver golden crimson violet teal indigo scarlet
ivory beige small large tiny big old new round square long short wooden plastic metal paper glass striped spotted
plain shiny dull soft hard heavy light thick thin fancy cheap broken clean dusty fresh sweet sour cold warm dry wet
""")

CONTAINERS = _words("""
boxes bags packs baskets crates trays cartons cases drawers piles rows sacks bundles bins chests stacks tubs pouches
parcels shelves groups sets bunches packets racks trunks buckets jars heaps baggies lockers cabinets barrels hampers
satchels suitcases backpacks bowls tins folders
""")

PLACES = _words("""
kitchen garden garage attic basement school library market park shop office barn bakery castle museum harbor forest
village classroom studio hotel cabin workshop theater stadium church hospital station palace temple tower tent
cellar farm factory warehouse gallery gym cafe pantry
""")

GAINS = _words("""
buys finds gets wins collects receives picks earns borrows makes gathers adds takes obtains orders discovers grabs
acquires inherits imports fetches catches unpacks steals rents
""")

LOSSES = _words("""
loses sells uses drops breaks donates trades spends returns hides burns mails ships discards wastes forgets lends
misplaces destroys recycles crushes drowns exports removes buries
""")

CONNECTORS = _words("""
So Then Now Next Thus Hence Therefore Again Also Here First Later After Finally Afterwards Consequently Accordingly
Meanwhile Overall Altogether
""")

NAMES = FEMALE_NAMES + MALE_NAMES

# The fixed wording of questions and solutions, as it stands in a sentence.
_WORDING = _words("has have does doubles the number more of each and in all now many")


def vocabulary_words() -> list[str]:
    """Every word token, in the order of the ids; a word inside a sentence carries its leading space."""
    opening = [*NAMES, *CONNECTORS, "She", "He", "How", "####"]
    inside = [*NAMES, "She", "He", *NOUNS, *ADJECTIVES, *CONTAINERS, *GAINS, *LOSSES, *_WORDING, *"+-*="]
    return list(dict.fromkeys([*opening, *(f" {word}" for word in inside)]))
