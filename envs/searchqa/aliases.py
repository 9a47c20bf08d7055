"""What else is a right answer, and which words give one away: tables, by hand.

The World Factbook writes "UAE", "Kenyan shillings", "Yaounde"; a policy that writes "United Arab
Emirates", "Kenyan shilling", "Yaoundé" is as right. Rules make most other forms (facts.py); here is
what no rule knows.
"""

# A country's title in the corpus -> its other names.
COUNTRIES: dict[str, tuple[str, ...]] = {
    "United Arab Emirates": ("UAE",),
    "United States": ("USA", "US", "United States of America", "America"),
    "United Kingdom": ("UK", "Great Britain", "Britain"),
    "Democratic Republic of the Congo (DRC)": (
        "Democratic Republic of the Congo",
        "DRC",
        "DR Congo",
        "Congo, Democratic Republic of the",
    ),
    "Republic of the Congo (Brazzaville)": (
        "Republic of the Congo",
        "Congo (Brazzaville)",
        "Congo",
        "Congo, Republic of the",
    ),
    "Cote d'Ivoire (Ivory Coast)": ("Cote d'Ivoire", "Côte d'Ivoire", "Ivory Coast"),
    "Vatican City (Holy See)": ("Vatican City", "Holy See", "Holy See (Vatican City)", "Vatican"),
    "South Korea": ("S. Korea", "Republic of Korea", "Korea, South"),
    "North Korea": ("N. Korea", "Korea, North"),
    "New Zealand": ("NZ",),
    "Burma": ("Myanmar",),
    "Turkey": ("Turkiye", "Türkiye"),
    "Czechia": ("Czech Republic",),
    "North Macedonia": ("Macedonia",),
    "Eswatini": ("Swaziland",),
    "Cabo Verde": ("Cape Verde",),
    "Timor-Leste": ("East Timor",),
    "The Gambia": ("Gambia", "Gambia, The"),
    "The Bahamas": ("Bahamas", "Bahamas, The"),
    "Federated States of Micronesia": ("Micronesia",),
    "Falkland Islands": ("Islas Malvinas", "Falklands"),
    "US Virgin Islands": ("Virgin Islands", "United States Virgin Islands", "USVI"),
    "Curacao": ("Curaçao",),
    "Sao Tome and Principe": ("São Tomé and Príncipe",),
    "Soviet Union": ("USSR",),
    "Russia": ("Russian Federation",),
    "China": ("People's Republic of China", "PRC"),
    "Netherlands": ("Holland",),
    "Antigua and Barbuda": ("Antigua & Barbuda",),
    "Trinidad and Tobago": ("Trinidad & Tobago",),
    "Saint Kitts and Nevis": ("St. Kitts and Nevis", "St. Kitts & Nevis"),
    "Saint Lucia": ("St. Lucia",),
    "Saint Vincent and the Grenadines": ("St. Vincent and the Grenadines",),
    "Saint Helena, Ascension, and Tristan da Cunha": ("Saint Helena", "St. Helena"),
    "Saint Barthelemy": ("St. Barts", "Saint Barthélemy"),
    "Saint Martin": ("St. Martin",),
    "Saint Pierre and Miquelon": ("St. Pierre and Miquelon",),
    "Bosnia and Herzegovina": ("Bosnia", "Bosnia & Herzegovina"),
}
# How tables of the book write a country -> its title.
WRITTEN = {name: title for title, names in COUNTRIES.items() for name in names if name != "Congo"}
WITH_ARTICLE = {
    "Bahamas", "British Indian Ocean Territory", "Central African Republic", "Comoros",
    "Democratic Republic of the Congo", "Dominican Republic", "Federated States of Micronesia",
    "Gambia", "Gaza Strip", "Isle of Man", "Maldives", "Netherlands", "Philippines",
    "Republic of the Congo", "United Arab Emirates", "United Kingdom", "United States", "West Bank",
}  # fmt: skip
# Words of countries' names that tell nothing of which country.
TELL_NOTHING = frozenset(
    "republic kingdom state states union federal democratic people peoples islamic united "
    "commonwealth territory island islands south north west east central none singular plural "
    "former term note with from and the republica republique city citizens nationals collective "
    "still used among english speakers french arabic spanish also known saint country new overseas "
    "independent principality socialist official colloquial current name disputed prior "
    "august".split()
)
RULERS = {
    "UK", "France", "Spain", "Portugal", "Soviet Union", "Belgium", "Netherlands", "Yugoslavia",
    "Ottoman Empire", "US", "Japan", "Haiti", "Ethiopia", "Sudan", "Serbia", "Pakistan", "Brazil",
    "Russia", "Colombia",
}  # fmt: skip

# A fact as the book has it -> other right answers.
ANSWERS: dict[str, tuple[str, ...]] = {
    "Washington, D.C.": ("Washington",),
    "Yaounde": ("Yaoundé",),
    "Lome": ("Lomé",),
    "Noumea": ("Nouméa",),
    "Reykjavik": ("Reykjavík",),
    "Torshavn": ("Tórshavn",),
    "Chisinau": ("Chișinău",),
    "Sao Tome": ("São Tomé",),
    "Sanaa": ("Sana'a", "Sana"),
    "Port-Vila": ("Port Vila",),
    "Nuku'alofa": ("Nuku alofa",),
    "Ulaanbaatar": ("Ulan Bator",),
    "Tarawa": ("South Tarawa",),
    "Nuuk": ("Godthab",),
    "Pristina": ("Prishtina", "Prishtine"),
    "Ashgabat": ("Asgabat",),
    "Mata-Utu": ("Mata Utu",),
    "Hagatna": ("Hagåtña",),
    "Mount McKinley": ("Denali",),
    "Gora El'brus": ("Elbrus", "Mount Elbrus"),
    "K2": ("Mount Godwin-Austen", "Godwin-Austen"),
    "Puncak Jaya": ("Carstensz Pyramid",),
    "Kuh-e Damavand": ("Damavand", "Mount Damavand"),
    "Yu Shan": ("Yushan", "Jade Mountain"),
    "Paektu-san": ("Mount Paektu", "Paektu", "Baekdu"),
    "Halla-san": ("Hallasan", "Mount Halla", "Halla"),
    "Fan Si Pan": ("Fansipan",),
    "Gunung Kinabalu": ("Mount Kinabalu", "Kinabalu"),
    "Jebel Toubkal": ("Mount Toubkal", "Toubkal"),
    "Kanchenjunga": ("Kangchenjunga",),
    "Phnum Aoral": ("Phnom Aural", "Mount Aoral"),
    "Mogoton": ("Mogotón",),
    "Jengish Chokusu": ("Pik Pobedy", "Victory Peak"),
    "Blue Mountain Peak": ("Blue Mountain",),
    "Margherita Peak on Mount Stanley": ("Mount Stanley",),
    "Pic Marguerite on Mont Ngaliema": ("Mount Stanley", "Margherita Peak", "Mont Ngaliema"),
    "Fako on Mont Cameroun": ("Mount Cameroon", "Mont Cameroun"),
    "Konigstein on Brandberg": ("Brandberg",),
    "Dufourspitze on Monte Rosa": ("Monte Rosa",),
    "Laberintos del Norte on Mount Roraima": ("Mount Roraima",),
    "Pico de Teide": ("Teide", "Mount Teide"),
    "Lied der Deutschen": ("Deutschlandlied",),
    "Mt'a Shkhara": ("Shkhara", "Mount Shkhara"),
    "Emirati dirhams": ("UAE dirham",),
    "Caymanian dollars": ("Cayman Islands dollar",),
    "Bruneian dollars": ("Brunei dollar",),
    "Belizean dollars": ("Belize dollar",),
    "Fijian dollars": ("Fiji dollar",),
    "Falkland pounds": ("Falkland Islands pound",),
    "Burundi francs": ("Burundian franc",),
    "Kazakhstanis": ("Kazakhs", "Kazakh"),
    "Kyrgyzstanis": ("Kyrgyz",),
    "Tajikistanis": ("Tajiks", "Tajik"),
    "Turkmenistanis": ("Turkmens", "Turkmen"),
    "Uzbekistani": ("Uzbeks", "Uzbek"),
    "Salvadorans": ("Salvadoreans", "Salvadorean"),
    "Argentines": ("Argentinians", "Argentinian", "Argentineans"),
    "Ivoirians": ("Ivorians", "Ivorian"),
    "Comorans": ("Comorians", "Comorian"),
    "Nepali": ("Nepalese",),
    "Serbs": ("Serbians", "Serbian"),
    "Slovenes": ("Slovenians", "Slovenian"),
    "Surinamers": ("Surinamese",),
    "Cabo Verdeans": ("Cape Verdeans", "Cape Verdean"),
    "Kosovan": ("Kosovars", "Kosovar"),
    "Malagasy": ("Madagascans", "Madagascan"),
    "Timorese": ("East Timorese",),
    "Virgin Islanders": ("US Virgin Islanders",),
    "Qatari rials": ("Qatari riyal",),
    "Comoran francs": ("Comorian franc",),
    "reals": ("reais",),
    "Fête de la Fédération": ("Bastille Day",),
    "Aragats Lerrnagagat'": ("Aragats", "Mount Aragats"),
    "Maja e Korabit": ("Korab", "Mount Korab"),
    "Golem Korab": ("Korab", "Mount Korab"),
}
# Without accents -> other forms.
CURRENCIES: dict[str, tuple[str, ...]] = {
    "Communaute Financiere Africaine francs": (
        "Communaute Financiere Africaine franc", "CFA franc", "CFA francs",
        "West African CFA franc", "West African CFA francs",
    ),
    "Cooperation Financiere en Afrique Centrale francs": (
        "Cooperation Financiere en Afrique Centrale franc", "CFA franc", "CFA francs",
        "Central African CFA franc", "Central African CFA francs",
    ),
    "Comptoirs Francais du Pacifique francs": (
        "Comptoirs Francais du Pacifique franc", "CFP franc", "CFP francs",
    ),
    "konvertibilna markas": (
        "konvertibilna marka", "convertible mark", "convertible marks", "marka",
    ),
    "Renminbi yuan": ("yuan", "renminbi", "Chinese yuan"),
    "nuevo sol": ("sol", "nuevos soles", "soles", "Peruvian sol"),
    "new Israeli shekels": (
        "new Israeli shekel", "Israeli shekel", "Israeli shekels", "shekel", "shekels",
        "Israeli new shekel", "NIS",
    ),
    "British pounds": ("British pound", "pound sterling", "pounds sterling", "pound", "pounds"),
    "togrog/tugriks": ("togrog", "tugrik", "tugriks", "Mongolian tugrik", "Mongolian togrog"),
    "Aruban guilders/florins": (
        "Aruban guilder", "Aruban florin", "Aruban guilders", "Aruban florins", "florin", "florins",
    ),
    "Netherlands Antillean guilders": (
        "Netherlands Antillean guilder", "Antillean guilder", "guilder",
    ),
}  # fmt: skip
SINGULAR = {
    "kroner": "krone", "kronor": "krona", "kronur": "krona", "koruny": "koruna", "leva": "lev",
    "lei": "leu", "leke": "lek", "zlotych": "zloty", "meticais": "metical", "maloti": "loti",
    "emalangeni": "lilangeni", "colones": "colon", "quetzales": "quetzal", "leones": "leone",
    "rupees": "rupee", "pa'anga": "pa'anga",
}  # fmt: skip
IRREGULAR_PEOPLE: dict[str, tuple[str, ...]] = {
    "kn": ("Koreans", "Korean", "North Koreans", "North Korean"),
    "ks": ("Koreans", "Korean", "South Koreans", "South Korean"),
    "la": ("Lao", "Laos", "Laotian", "Laotians"),
    "ei": ("Irish", "Irishmen", "Irishman", "Irishwoman"),
    "fr": ("French", "Frenchmen", "Frenchman", "Frenchwoman"),
    "nl": ("Dutch", "Dutchmen", "Dutchman", "Dutchwoman"),
    "im": ("Manx", "Manxmen", "Manxman", "Manxwoman"),
    "uk": ("Britons", "Briton", "British", "Brit"),
    "hr": ("Croats", "Croat", "Croatian", "Croatians"),
}
# First words of mountains' names that mean mountain.
PEAKS = set(
    "Mount Mt. Mont Monte Monts Gora Hora Jabal Jebel Cerro Pico Pic Volcan Nevado Gunung Doi "
    "Morne Phu Bukit Pik".split()
)
COMMON_HOLIDAYS = {"Independence Day", "National Day", "Republic Day", "Constitution Day"}
# Titles of more than one place -> where we ask for them; elsewhere the book lacks the other anthem.
SHARED_ANTHEMS: dict[str, tuple[str, ...]] = {
    "God Save the King": ("uk",),
    "La Marseillaise": ("fr",),
    "The Star-Spangled Banner": ("us",),
    "Het Wilhelmus": ("nl",),
    "Yiyongjun Jinxingqu": ("ch",),
    "Ymnos eis tin Eleftherian": ("cy", "gr"),
}
SYMBOLS: dict[str, tuple[str, ...]] = {
    "khumo": ("khumo bird",),
    "mythical thunder dragon": ("thunder dragon",),
    "rhododendron blossom": ("rhododendron",),
    "bauhinia flower": ("bauhinia",),
    "lotus blossom": ("lotus",),
    "cedar tree": ("cedar",),
    "brown pelican": ("pelican",),
    "coconut tree": ("coconut palm",),
    "palmchat": ("palmchat bird",),
    "fallow deer": ("deer",),
    "silk cotton tree": ("silk-cotton tree", "kapok tree"),
    "oryx": ("oryx antelope",),
    "aurochs": ("auroch",),
}
GOODS: dict[str, tuple[str, ...]] = {
    "crude petroleum": ("crude oil", "petroleum", "oil"),
    "refined petroleum": ("refined oil", "petroleum products"),
    "cars": ("car", "automobiles"),
    "garments": ("garment", "clothing"),
    "ships": ("ship",),
    "soybeans": ("soybean",),
    "diamonds": ("diamond",),
    "bananas": ("banana",),
}
