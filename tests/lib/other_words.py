"""A folder of LIMIT's form in words of other lists than the package's: attributes of two and three words, and names
with initials. Words recur as in LIMIT, where three of four attributes of several words share a word with another and
one in eight has no word of its own (here all do, and one in seven).

``python tests/lib/other_words.py FOLDER`` writes 2,500 biographies with 20 likes each in BEIR layout; 46 of them answer
its 200 queries, two each.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

from icr_bench.benchmarks.limit import biography, words


def listed(text: str, between: str | None = None) -> list[str]:
    return [" ".join(entry.split()) for entry in text.split(between)]


MANNERS = listed("""
Amateur Antique Arctic Backyard Baroque Beginner Blindfolded Bohemian Borrowed Brass Bronze Candlelit Cardboard
Carved Ceremonial Cheap Clockwork Coastal Colonial Competitive Copper Crooked Desert Discarded Distant Dockside
Enamelled Experimental Faded Family Festive Forgotten Foreign Freehand Frozen Giant Gilded Glass Gothic Granite
Handmade Haunted Homemade Imaginary Improvised Indoor Industrial Inflatable Ivory Japanese Knitted Lakeside
Leather Legendary Lunar Marble Medieval Midnight Miniature Mountain Municipal Naval Nomadic Northern Obsolete
Orbital Ornamental Outdoor Painted Paper Pocket Polished Portable Provincial Quiet Rainy Recycled Reversible
Riverside Rooftop Rural Rusty Scottish Seasonal Secret Silent Silver Simulated Solar Speculative Striped
Suburban Sunken Tidal Timber Travelling Tropical Underground Unfinished Untranslated Urban Varnished Velvet
Victorian Volcanic Wandering Waterproof Weekend Wicker Wooden Woollen
""")

THINGS = listed(
    """
Accordion Repair;Airship Diagrams;Almanacs;Alphabet Books;Anvil Work;Apple Presses;Armchairs;Astrolabes;
Atlases;Badge Collecting;Barn Dances;Barometers;Beekeeping;Bell Towers;Birdhouses;Board Meetings;Boat Trips;
Bookbinding;Bottle Labels;Bridge Building;Bus Timetables;Cabinets;Calendars;Canal Walks;Canoe Races;Caravans;
Card Tricks;Carpets;Cheese Tasting;Chess Puzzles;Choir Practice;Cinema Posters;Circus Acts;Coin Hoards;
Compass Making;Cradles;Crane Driving;Curtains;Dictionaries;Dinner Speeches;Doll Houses;Door Knockers;
Drainpipes;Drum Lessons;Egg Cups;Elevators;Ferry Crossings;Fireplaces;Flag Designs;Flower Shows;Fountains;
Fruit Stalls;Garden Gnomes;Gear Wheels;Ghost Tours;Glove Patterns;Greenhouses;Hammocks;Harbour Maps;Hat Boxes;
Hedge Trimming;Hotel Lobbies;Ice Sculptures;Ink Bottles;Jigsaw Cutting;Kettles;Key Rings;Kite Festivals;
Ladders;Lamp Shades;Lantern Parades;Letter Writing;Lighthouse Keeping;Lullabies;Map Folding;Marching Bands;
Menu Cards;Mirror Frames;Monograms;Mural Restoration;Nameplates;Newspaper Archives;Notebooks;Observatories;
Orchestra Seats;Organ Pipes;Paddle Steamers;Parade Floats;Pencil Cases;Picnic Baskets;Plaster Casts;
Pottery Wheels;Pulpits;Quilts;Quiz Nights;Radio Plays;Railings;Rope Splicing;Rowing Clubs;Saddles;
Sail Mending;School Reunions;Scrapbooks;Shop Windows;Signposts;Sleigh Rides;Snow Globes;Spice Racks;
Staircases;Stamp Auctions;Stencils;Street Maps;Tea Ceremonies;Telegrams;Theatre Masks;Ticket Stubs;Toy Trains;
Travel Diaries;Trophies;Umbrellas;Vase Painting;Walking Sticks;Water Clocks;Weather Logs;Wedding Cakes;
Whistles;Window Boxes;Wreaths;Abbeys;Acrobats;Aerials;Albums;Aloe Plants;Anchors;Antlers;Apricots;
Aqueducts;Aprons;Arches;Asparagus;Avocados;Axles;Bagpipes;Ballads;Bandages;Banjos;Banners;Barges;
Basil Pots;Bathtubs;Batteries;Beetles;Benches;Billboards;Biscuits;Blackboards;Blankets;Boulders;Bracelets;
Brooms;Buckets;Bugles;Bungalows;Burrows;Buttons;Cabbages;Cake Stands;Candles;Canyons;Carnivals;Carousels;
Castanets;Cathedrals;Cauldrons;Cellos;Chalets;Chandeliers;Chapels;Cherries;Chimneys;Chisels;Chutneys;
Cinnamon;Cliffs;Clocks;Cloisters;Cobwebs;Coffins;Comets;Corkscrews;Cottages;Crayons;Crickets;Crosswords;
Crowns;Cucumbers;Cupboards;Cushions;Cymbals;Daffodils;Dams;Deckchairs;Dice;Dominoes;Donkeys;Dormice;
Dragonflies;Drawbridges;Dungeons;Earrings;Eclipses;Embroidery;Engines;Envelopes;Escalators;Falcons;Fans;
Farmhouses;Feathers;Fences;Ferns;Fiddles;Fireworks;Fishponds;Flutes;Folktales;Forges;Fossils;Foxgloves;
Frescoes;Funerals;Funnels;Gardens;Gargoyles;Garlands;Gazebos;Geese;Geysers;Ginger Jars;Glaciers;Goblets;
Gondolas;Granaries;Graveyards;Guitars;Gumboots;Gutters;Gypsum;Haikus;Hairpins;Hammers;Handkerchiefs;Harps;
Haystacks;Hedgehogs;Helmets;Herons;Hinges;Hoes;Honeycombs;Horseshoes;Hourglasses;Hymns;Icicles;Idioms;
Igloos;Inns;Irises;Islands;Jackets;Jellyfish;Jetties;Jewels;Jugs;Juniper;Kayaks;Kennels;Kilns;Kiosks;
Kitchens;Knights;Lagoons;Lanes;Larders;Lavender;Lemons;Lichens;Limericks;Lizards;Locomotives;Looms;Lutes;
Magnets;Mandolins;Manuscripts;Maples;Marionettes;Markets;Marmalade;Mattresses;Mazes;Meadows;Medals;Melons;
Mermaids;Meteors;Microscopes;Mills;Mines;Mittens;Moats;Monasteries;Moths;Mousetraps;Museums;Mushrooms;
Nails;Napkins;Necklaces;Nests;Nettles;Novels;Nursery Rhymes;Oars;Oases;Oboes;Olives;Omelettes;Onions;
Operas;Orchards;Ovens;Owls;Pagodas;Palaces;Pamphlets;Pancakes;Parasols;Parrots;Parsnips;Pavilions;
Peacocks;Pebbles;Pelicans;Pendulums;Periscopes;Pheasants;Pianos;Piers;Pilgrimages;Pillows;Pistachios;
Planetariums;Ploughs;Plums;Pocketknives;Porcelain;Porches;Portraits;Postcards;Potatoes;Prisms;Proverbs;
Puddings;Pumps;Puppets;Pyramids;Quarries;Quays;Quinces;Radishes;Rafts;Rattles;Ravens;Recipes;
Refrigerators;Reservoirs;Rhubarb;Ribbons;Riddles;Rings;Robots;Rocking Horses;Rubies;Rugs;Rulers;Sandals;
Sandcastles;Satchels;Sausages;Saxophones;Scarecrows;Scarves;Scissors;Scooters;Screwdrivers;Sculleries;
Seashells;Sheds;Shipwrecks;Shovels;Shrines;Sieves;Skateboards;Skylights;Slippers;Snails;Soups;Spiders;
Spinning Tops;Spoons;Squirrels;Starfish;Statues;Steeples;Stews;Stilts;Stoves;Strawberries;Submarines;
Suitcases;Sundials;Swans;Swings;Swords;Tablecloths;Tambourines;Tankards;Tapestries;Tents;Terraces;Thimbles;
Thunderstorms;Tiles;Toads;Tortoises;Towers;Tractors;Treehouses;Trombones;Trumpets;Tugboats;Tunnels;Turnips;
Tweezers;Typewriters;Ukuleles;Valleys;Verandas;Viaducts;Villages;Violas;Volcanoes;Waffles;Wagons;
Waistcoats;Wallpapers;Walnuts;Wardrobes;Washboards;Waterfalls;Wells;Whales;Wheelbarrows;Wigs;Windmills;
Wolves;Wrenches;Yachts;Zeppelins;Zithers
""",
    ";",
)

SURNAMES = listed("""
Abernethy Ackroyd Arkwright Ashdown Babington Bagshaw Balderstone Barrowclough Birtwhistle Blenkinsop Bracegirdle
Brathwaite Brocklehurst Butterworth Cadwallader Carruthers Chivers Clutterbuck Cobbold Crabtree Culpepper Dalrymple
Darlington Dewhurst Drinkwater Eccleston Entwistle Fairweather Fanshawe Featherstone Fothergill Gathercole
Gilderoy Golightly Gooseberry Greenhalgh Grimshaw Hardcastle Hathersage Hebblethwaite Higginbottom Hollingsworth
Huckabee Ickleford Inchbald Jellicoe Kettlewell Kilpatrick Knatchbull Langstaff Leatherbarrow Lillywhite
Longbottom Loxley Mainwaring Micklethwait Molyneux Muggeridge Netherwood Oglethorpe Ollerenshaw Osbaldeston
Pankhurst Peppercorn Pettigrew Pilkington Postlethwaite Quattlebaum Quiller Ramsbottom Rickenbacker Rowbotham
Scattergood Shackleton Shufflebottom Sidebottom Snodgrass Stonehouse Swindlehurst Tattersall Throckmorton
Thistlethwaite Tunnicliffe Twelvetrees Umfreville Venables Wadsworth Wetherby Whippersnapper Wigglesworth Winterbottom
Witherspoon Wolstenholme Wrigglesworth Yarborough Youngblood
""")

DOCUMENTS, GOLDS, LIKES, QUERIES = 2_500, 46, 20, 200


def write(folder: Path, seed: int = 0) -> None:
    """Write corpus, queries and judgments.

    Raises:
        ValueError: an attribute or a surname is one of the package's own.
    """
    rng = random.Random(f"other words {seed}")
    things = rng.sample(THINGS, len(THINGS))
    twice = things[
        : len(things) // 14
    ]  # two attributes each, which is one in eight of their attributes with no own word
    heads = itertools.chain.from_iterable(rng.sample(MANNERS, len(MANNERS)) for _ in itertools.count())
    attributes = list(dict.fromkeys(f"{manner} {thing}" for manner, thing in zip(heads, things + twice, strict=False)))
    rng.shuffle(attributes)
    used = {word for purpose in ("training", "benchmark", "development") for word in words("attributes", purpose)}
    if known := sorted((used & set(attributes)) | (set(words("last", "training")) & set(SURNAMES))):
        raise ValueError(f"not other words: {known}")
    initials = "ABCDEFGHIJKLMNOPRSTVW"
    named = [f"{a}. {b}. {last}" for a, b, last in itertools.product(initials, initials, SURNAMES)]
    people = rng.sample(named, DOCUMENTS)
    asked, others = attributes[:QUERIES], attributes[QUERIES:]
    liked: list[list[str]] = [[] for _ in people]
    pairs = rng.sample(list(itertools.combinations(range(GOLDS), 2)), QUERIES)
    for attribute, pair in zip(asked, pairs, strict=True):
        for person in pair:
            liked[person].append(attribute)
    for own in liked:
        own += rng.sample(others, LIKES - len(own))
        rng.shuffle(own)
    (folder / "qrels").mkdir(parents=True)
    rows = [{"_id": name, "text": biography(name, own)} for name, own in zip(people, liked, strict=True)]
    rng.shuffle(rows)
    asks = [{"_id": f"q{i}", "text": f"Who likes {attribute}?"} for i, attribute in enumerate(asked)]
    judged = [f"q{i}\t{people[person]}\t1\n" for i, pair in enumerate(pairs) for person in pair]
    for name, lines in (("corpus", rows), ("queries", asks)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    head = "query-id\tcorpus-id\tscore\n"
    (folder / "qrels" / "test.tsv").write_text(head + "".join(judged), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
